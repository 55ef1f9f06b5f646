"""Killed anywhere and resumed, a run leaves what one leaves that nobody touched: every weight, every file.

Each test is a few lives of one run; `make test-faults` has hundreds of them (tests/faults/test_killed_rl.py).
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from helpers.kills import KilledRun, LaunchedRun
from helpers.rl_runs import finish, settings_of, write_setup, write_tool_setup
from rollbook.records.run_info import read_run_info
from rollbook.records.token_files import read_manifest
from rollbook.records.token_places import files_of
from rollbook.records.tokens import read_sequences
from rollbook.rl.settings import RlSettings

EXPORT = {"trainer": {"experimental": {"token_export": {"format": "parquet"}}}}
# What it is killed in: the moment, and which of those in that life. The run has six iterations, an evaluation
# before every second one, and a checkpoint after every second one.
LIVES: dict[str, list[tuple[str, int]]] = {
    "the start": [
        ("before open .run.json.lock", 1),
        ("half write .run.json.tmp", 1),
        ("before open .config.json.tmp", 1),
        ("after replace config.json", 1),
    ],
    "sampling": [
        ("after step of sampling", 7),
        ("before write train_iteration_N_transcripts.jsonl", 18),
        ("half write train_iteration_N_transcripts.jsonl", 5),
        ("after write train_iteration_N_transcripts.jsonl", 30),
        ("half write train_iteration_N_rollout_summaries.jsonl", 20),
    ],
    "an evaluation": [
        ("before open eval_test_iteration_N_transcripts.jsonl", 2),
        ("half write eval_test_iteration_N_rollout_summaries.jsonl", 3),
        ("after replace eval_test_iteration_N.html", 2),
        ("after write eval_test_iteration_N_rollout_summaries.jsonl", 9),
    ],
    "the files of an iteration": [
        ("half write .train_iteration_N_transcripts.jsonl.tmp", 1),
        ("before replace train_iteration_N.html", 2),
        ("after replace train_iteration_N.html", 1),
        ("half write .train_iteration_N_logtree.json.tmp", 3),
    ],
    "training": [
        ("before _backward of training", 1),
        ("before step of the optimizer", 1),
        ("after step of the optimizer", 4),
        ("after step_of_shares of training", 1),
    ],
    "the logs": [
        ("half write iterations.jsonl", 2),
        ("before write metrics.jsonl", 2),
        ("after write iterations.jsonl", 3),
        ("half write metrics.jsonl", 4),
        ("after write metrics.jsonl", 1),
    ],
    "a checkpoint": [
        ("before mkdir checkpoints/.N.making", 1),
        ("half write checkpoints/.N.making/model.safetensors", 1),
        ("after write checkpoints/.N.making/optimizer.safetensors", 1),
        ("half write checkpoints/.N.making/.COMPLETE.tmp", 1),  # before the mark
        ("after replace checkpoints/.N.making/COMPLETE", 1),  # after it
        ("after rename checkpoints/N", 1),
        ("half write checkpoints.jsonl", 2),
        ("after write checkpoints.jsonl", 1),
    ],
    "a resume": [
        ("before step of the optimizer", 4),
        ("after rename superseded/attempt_N/train_iteration_N_transcripts.jsonl", 1),
        ("before fsync iterations.jsonl", 1),
        ("half write superseded/attempt_N/metrics.jsonl.from_byte_N", 1),
        ("half write .run.json.tmp", 1),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_setup(tmp_path_factory.mktemp("rl"))


@pytest.fixture(scope="module")
def whole(setup: Path) -> Path:
    finish(settings_of(setup, setup / "whole"))
    return setup / "whole"


def killed(settings: RlSettings, moments: list[tuple[str, int]], **options: Any) -> KilledRun:
    run = KilledRun(settings, **options)
    for moment, nth in moments:
        assert run.kill_at(moment, nth), f"it ended before it came to {moment}, {nth}"
    return run


@pytest.mark.parametrize("what", LIVES)
def test_killed_in(setup: Path, whole: Path, tmp_path: Path, what: str) -> None:
    killed(settings_of(setup, tmp_path / "run"), LIVES[what]).end(whole)


def test_several_turns_with_a_tool(setup: Path, tmp_path: Path) -> None:
    changes = write_tool_setup(setup)
    whole, settings = (settings_of(setup, tmp_path / name, **changes) for name in ("whole", "run"))
    finish(whole)
    moments = [
        ("after step of sampling", 30),
        ("half write train_iteration_N_transcripts.jsonl", 50),
        ("before step of the optimizer", 2),
    ]
    killed(settings, moments).end(Path(whole.log_path))


def test_while_it_removes_old_checkpoints(setup: Path, tmp_path: Path) -> None:
    """Also those of the last iteration, after which there is nothing left to train."""
    whole, settings = (settings_of(setup, tmp_path / name, save_total_limit=1) for name in ("whole", "run"))
    finish(whole)
    run = killed(settings, [("before rename checkpoints/.N.old.making", 1)])
    saved = {path.name for path in (run.root / "checkpoints").iterdir() if path.name.isdecimal()}
    assert saved > {"000006"}
    assert run.kill_at("before unlink checkpoints/.N.old.making/optimizer.safetensors")
    run.end(Path(whole.log_path))


@pytest.mark.faults
@pytest.mark.faults
def test_two_processes_that_export_their_tokens(setup: Path, tmp_path: Path) -> None:
    changes = {"processes": 2, "save_every": 1, **EXPORT}
    whole, settings = (settings_of(setup, tmp_path / name, **changes) for name in ("whole", "run"))
    finish(whole)
    run = KilledRun(settings)
    assert run.kill_at("half write token_exports/rank_1_N.arrows", 2, rank=1)
    assert run.stop_at("before step of the optimizer", 1, rank=1)  # the others hear of it
    assert run.kill_at("before replace token_exports/rank_0_N.parquet")
    run.end(Path(whole.log_path))


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("jsonl", "absolute"),
        pytest.param("jsonl", "x.jsonl", marks=pytest.mark.faults),
        pytest.param("jsonl", "x", marks=pytest.mark.faults),
        pytest.param("parquet", "absolute", marks=pytest.mark.faults),
        pytest.param("parquet", "x.parquet", marks=pytest.mark.faults),
    ],
)
def test_two_launched_processes_that_export_to_one_path(
    setup: Path, tmp_path: Path, kind: str, place: str
) -> None:
    """`rollbook rl processes=2`, one of them killed in the middle of a write, and resumed by the same
    command: a file for each, every record once, none torn."""

    def settings(name: str) -> RlSettings:
        path = str(tmp_path / "elsewhere" / name / f"x.{kind}") if place == "absolute" else place
        trainer = {"experimental": {"token_export": {"format": kind, "path": path}}}
        changes = {"processes": 2, "save_every": 1, "iterations": 4, "evals": [], "trainer": trainer}
        return settings_of(setup, tmp_path / name, **changes)

    finish(settings("whole"))
    run = LaunchedRun(settings("run"), watched=tmp_path)
    directory, prefix = {
        "absolute": ("elsewhere/run", "x_"), "x": ("run/x", ""),
    }.get(place, ("run", "x_"))  # fmt: skip
    written = f"{directory}/{prefix}rank_1{'.jsonl' if kind == 'jsonl' else '_N.arrows'}"
    assert run.kill_at(f"half write {written}", 2, rank=1)
    run.end(tmp_path / "whole", but=("config.json",) if place == "absolute" else ())
    found = exported(tmp_path / directory / f"{prefix}manifest.jsonl")
    assert found == exported(tmp_path / directory.replace("run", "whole") / f"{prefix}manifest.jsonl")
    assert {rank for rank, *_ in found} == {0, 1} and len(found) == len(set(found)) > 20
    assert not list(tmp_path.rglob("token_exports"))


def exported(manifest: Path) -> list[tuple[Any, ...]]:
    """Every record with what it holds, in the order of the files; the manifest has counted each."""
    steps, records = list(read_manifest(manifest)), []
    for file in files_of(manifest):
        assert file.end is None or file.path.stat().st_size == file.end
        for one in read_sequences(file.path):
            columns = [one.get(name) for name in ("token_ids", "advantages", "trainer_logprobs")]
            values = tuple(repr(None if column is None else column.tolist()) for column in columns)
            records.append((one.rank, one.iteration, one.group_idx, one.traj_idx, one.text, *values))
    assert [step.iteration for step in steps] == list(range(len(steps))) and all(s.complete for s in steps)
    assert len(records) == sum(step.records for step in steps)
    for rank in (0, 1):
        parts = [part for step in steps for part in step.ranks if part.rank == rank]
        assert sum(part.records for part in parts) == sum(own == rank for own, *_ in records)
        assert all(part.complete for part in parts)
    return records


def test_while_it_starts_over(setup: Path, whole: Path, tmp_path: Path) -> None:
    """What it has taken back until then is not there to be resumed."""
    settings = settings_of(setup, tmp_path / "run")
    assert KilledRun(settings).kill_at("after write metrics.jsonl", 5)
    killed(settings, [("before fsync metrics.jsonl", 1)], words=("--overwrite",)).end(whole)


@pytest.mark.parametrize(
    ("moment", "nth", "how"),
    [
        ("after step of sampling", 45, signal.SIGTERM),
        pytest.param("after rename checkpoints/N", 1, signal.SIGINT, marks=pytest.mark.faults),
        pytest.param("before step of the optimizer", 1, signal.SIGHUP, marks=pytest.mark.faults),
        pytest.param(
            "before write eval_test_iteration_N_transcripts.jsonl",
            8,
            signal.SIGTERM,
            marks=pytest.mark.faults,
        ),
        pytest.param("before open metrics.jsonl", 1, signal.SIGTERM, marks=pytest.mark.faults),
    ],
)
def test_a_signal_saves_and_ends_resumable(
    setup: Path, whole: Path, tmp_path: Path, moment: str, nth: int, how: signal.Signals
) -> None:
    run = KilledRun(settings_of(setup, tmp_path / "run"))
    assert run.stop_at(moment, nth, how=how)
    assert read_run_info(run.root / "run.json").attempts[-1].outcome == "interrupted"
    run.end(whole)
