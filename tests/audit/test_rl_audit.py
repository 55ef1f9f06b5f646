"""The audit of reinforcement learning: balanced after kills, and each thing that is wrong found and named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import rollbook
from helpers.rl_runs import finish, settings_of, start, write_setup
from helpers.tampered import balanced, copy_of, cut_line, double_line, drop_line, edit_lines, edit_row, found
from helpers.trainer import run_several
from rollbook.audit.result import Audit, Kind
from rollbook.cli.main import main
from rollbook.rl.settings import RlSettings
from rollbook.rl.train import train

SUMMARIES = "train_iteration_000001_rollout_summaries.jsonl"
TRANSCRIPTS = "train_iteration_000001_transcripts.jsonl"
EXPORT, MANIFEST = "token_exports/rank_0.jsonl", "token_exports/manifest.jsonl"
METRICS, ITERATIONS, ALERTS = "metrics.jsonl", "iterations.jsonl", "alerts.jsonl"
KILLS = (
    ("half write train_iteration_N_transcripts.jsonl", 30),
    ("after write iterations.jsonl", 2),
    ("half write token_exports/rank_0.jsonl", 5),
    ("before rename checkpoints/N", 1),
)


def settings(setup: Path, log_path: Path, **changes: Any) -> RlSettings:
    """Several steps and passes, a loss that leaves tokens out, more groups than are trained, and the token
    export."""
    export = {"experimental": {"token_export": changes.pop("export", {})}}
    given = {"iterations": 4, "minibatches": 2, "epochs": 2, "oversample": 1.5, "trainer": export}
    given["loss"] = {"name": "ppo", "clip_low": 0.01, "clip_high": 0.01}
    return settings_of(setup, log_path, **(given | changes))


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_setup(tmp_path_factory.mktemp("rl"))


@pytest.fixture(scope="module")
def killed(setup: Path) -> Path:
    """A run that was killed a few times, each time somewhere else, and resumed."""
    asked = settings(setup, setup / "killed")
    for number, (moment, nth) in enumerate(KILLS):
        words = ["--resume"] if number else []
        with start(asked, *words, kill_at=moment, nth=nth) as trainer:
            assert trainer.wait() == -9, trainer.output
    finish(asked, "--resume")
    return setup / "killed"


@pytest.fixture(scope="module")
def other(setup: Path) -> Path:
    """Another run of the same settings, with another seed."""
    train(settings(setup, setup / "other", seed=4, iterations=2), log=lambda _: None)
    return setup / "other"


def test_a_run_that_was_killed_and_resumed_balances(killed: Path) -> None:
    audit = balanced(killed)
    assert (audit.done, audit.expected) == (4, 4)
    places = {(place.split, place.name): place for place in audit.places}
    train_places = [places[key] for key in places if key[0] == "train" and key[1] != "superseded"]
    assert sum(place.rollouts for place in train_places) == 4 * 6 * 4  # iterations, groups, size
    assert sum(place.prompts for place in train_places) == 4 * 6
    assert places["train", "superseded"].rollouts > 0
    assert places["eval", "evaluated"].rollouts == 3 * 6
    lines = [json.loads(line) for line in (killed / "metrics.jsonl").open()]
    assert sum(place.tokens for place in train_places) == sum(line.get("tokens/sampled", 0) for line in lines)
    assert places["train", "trained"].tokens == sum(line.get("tokens/trained", 0) for line in lines)
    (rank,) = audit.ranks
    assert rank.exported == rank.rows and rank.tokens == 2 * places["train", "trained"].tokens


def test_every_number_of_the_counts_is_compared(killed: Path) -> None:
    checks = {check.name: check for check in rollbook.audit(killed).checks}
    assert checks["exported rows that are those of the transcripts"].compared > 100
    assert checks["files as they were when recorded"].compared == (4 + 3) * 4
    assert checks["metrics counted again"].compared > checks["metrics counted again"].unknown


def drop_rollout(run: Path) -> None:
    drop_line(run / SUMMARIES, 7)


def double_rollout(run: Path) -> None:
    double_line(run / TRANSCRIPTS, 7)


def cut_rollout(run: Path) -> None:
    cut_line(run / TRANSCRIPTS, 7)


def cut_end(run: Path) -> None:
    edit_lines(run / SUMMARIES, lambda lines: [*lines[:-1], lines[-1][:-1]])


def edit_count(run: Path) -> None:
    edit_row(run / "metrics.jsonl", 2, lambda row: row.update({"tokens/sampled": row["tokens/sampled"] + 1}))


def edit_reward(run: Path) -> None:
    edit_row(run / "metrics.jsonl", 2, lambda row: row.update({"env/all/reward/total": 0.75}))


def edit_kept(run: Path) -> None:
    """As if only the first step had been counted."""

    def change(row: dict[str, Any]) -> None:
        assert 0 < row["loss/kept"] < 1
        row["loss/kept"] = 1.0

    edit_row(run / "metrics.jsonl", 2, change)


def edit_logprob(run: Path) -> None:
    def change(row: dict[str, Any]) -> None:
        row["turns"][0]["logprobs"][2] -= 0.5

    edit_row(run / TRANSCRIPTS, 1, change)


def edit_token(run: Path) -> None:
    def change(row: dict[str, Any]) -> None:
        row["turns"][0]["token_ids"][2] = 9

    edit_row(run / TRANSCRIPTS, trained_line(run), change)


def edit_exported_token(run: Path) -> None:
    edit_row(run / EXPORT, 20, lambda row: row["token_ids"].__setitem__(8, 3))


def edit_advantage(run: Path) -> None:
    edit_row(run / EXPORT, 20, lambda row: row.update(advantages=[9.0] * len(row["advantages"])))


def edit_part(run: Path, **values: Any) -> None:
    """What the manifest says of process 0 in iteration 1."""
    edit_row(run / MANIFEST, 2, lambda row: row["ranks"][0].update(values))


def edit_fate(run: Path) -> None:
    edit_row(run / "iterations.jsonl", 3, lambda row: row["rollouts"][fate_of(row)].__setitem__(2, "dropped"))


def edit_weights(run: Path) -> None:
    edit_row(run / "iterations.jsonl", 3, lambda row: row.update(weights_digest_before="0" * 32))


def drop_row_of_a_step(run: Path) -> None:
    edit_row(run / "iterations.jsonl", 3, lambda row: row["steps"][1]["micro_batches"][0].pop(0))


def trained_line(run: Path) -> int:
    """The line of a trained rollout in the files of iteration 1."""
    row = json.loads((run / "iterations.jsonl").read_bytes().splitlines()[2])
    return fate_of(row) + 1


def fate_of(row: dict[str, Any]) -> int:
    assert (row["split"], row["iteration"]) == ("train", 1)
    return next(place for place, fate in enumerate(row["rollouts"]) if fate[2] == "trained")


Change = Callable[[Path], object]
# What is done, the finding, and the verdict.
CHANGES: list[tuple[Change, Kind, str, dict[str, Any], str]] = [
    (drop_rollout, Kind.MISSING, SUMMARIES, {"key": "train/1/1/2"}, "incomplete"),
    (double_rollout, Kind.DOUBLED, TRANSCRIPTS, {"line": 8, "key": "train/1/1/2"}, "unbalanced"),
    (cut_rollout, Kind.UNREADABLE, TRANSCRIPTS, {"line": 7}, "unreadable"),
    (cut_rollout, Kind.MISSING, TRANSCRIPTS, {"key": "train/1/1/2"}, "unreadable"),
    (cut_end, Kind.UNREADABLE, SUMMARIES, {"line": 24}, "unreadable"),
    (edit_count, Kind.DIFFERS, METRICS, {"line": 2, "key": "tokens/sampled"}, "unbalanced"),
    (edit_reward, Kind.DIFFERS, METRICS, {"line": 2, "key": "env/all/reward/total"}, "unbalanced"),
    (edit_kept, Kind.DIFFERS, METRICS, {"line": 2, "key": "loss/kept"}, "unbalanced"),
    (edit_logprob, Kind.DIFFERS, TRANSCRIPTS, {}, "unbalanced"),
    (edit_token, Kind.DIFFERS, TRANSCRIPTS, {}, "unbalanced"),
    (edit_exported_token, Kind.DIFFERS, EXPORT, {"line": 20}, "unbalanced"),
    (edit_advantage, Kind.DIFFERS, EXPORT, {"line": 20}, "unbalanced"),
    (lambda run: (run / SUMMARIES).unlink(), Kind.MISSING, SUMMARIES, {}, "incomplete"),
    (lambda run: (run / EXPORT).unlink(), Kind.MISSING, EXPORT, {}, "incomplete"),
    (lambda run: drop_line(run / EXPORT, 40), Kind.MISSING, EXPORT, {"key": "train/1/0/3"}, "incomplete"),
    (lambda run: double_line(run / EXPORT, 40), Kind.DOUBLED, EXPORT, {"line": 41}, "unbalanced"),
    (lambda run: cut_line(run / EXPORT, 40), Kind.UNREADABLE, EXPORT, {"line": 40}, "unreadable"),
    (lambda run: drop_line(run / METRICS, 2), Kind.MISSING, METRICS, {}, "incomplete"),
    (lambda run: double_line(run / METRICS, 2), Kind.DOUBLED, METRICS, {"line": 3}, "unbalanced"),
    (lambda run: cut_line(run / METRICS, 2), Kind.UNREADABLE, METRICS, {"line": 2}, "unreadable"),
    (lambda run: edit_part(run, complete=False), Kind.DIFFERS, MANIFEST, {"line": 2}, "unbalanced"),
    (lambda run: edit_part(run, selected=7), Kind.DIFFERS, MANIFEST, {}, "unbalanced"),
    (lambda run: drop_line(run / MANIFEST, 2), Kind.MISSING, ITERATIONS, {"line": 3}, "unbalanced"),
    (edit_weights, Kind.DIFFERS, ITERATIONS, {"line": 3}, "unbalanced"),
    (edit_fate, Kind.DIFFERS, ITERATIONS, {}, "unbalanced"),
    (drop_row_of_a_step, Kind.MISSING, ITERATIONS, {"line": 3}, "unbalanced"),
    (lambda run: drop_line(run / ITERATIONS, 3), Kind.MISSING, ITERATIONS, {}, "unbalanced"),
    (lambda run: double_line(run / ITERATIONS, 3), Kind.DOUBLED, ITERATIONS, {"line": 4}, "unbalanced"),
    (lambda run: cut_line(run / ALERTS, 1), Kind.UNREADABLE, ALERTS, {"line": 1}, "unreadable"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "kind", "file", "where", "verdict"), CHANGES)
def test_what_is_wrong_is_found_and_named(
    killed: Path,
    tmp_path: Path,
    change: Change,
    kind: Kind,
    file: str,
    where: dict[str, Any],
    verdict: str,
) -> None:
    run = copy_of(killed, tmp_path / "run")
    if file == "alerts.jsonl" and not (run / file).stat().st_size:
        pytest.skip("nothing was raised in this run")
    change(run)
    audit = rollbook.audit(run)
    if where:
        found(audit, kind, file, **where)
    else:
        assert [finding for finding in audit.findings if (finding.kind, finding.file) == (kind, file)]
    assert audit.verdict == verdict
    assert audit.exit_code == (3 if verdict == "incomplete" else 1)


TURNS = """
from rollbook.envs import Environment
from rollbook.rollouts.types import Feedback

class Turns(Environment):
    def __init__(self):
        self.turns = 0

    def step(self, message):
        said = message.get("content") or ""
        self.turns += 1
        if "q" in said:
            raise ValueError("the sandbox is gone")
        done = self.turns == 3 or "a" in said
        more = [] if done else [{"role": "user", "content": "more"}]
        return Feedback(reward=float("e" in said), metrics={"length": len(said)}, messages=more, done=done)
"""


def test_several_turns_environments_failures_and_replies_cut_off(setup: Path, tmp_path: Path) -> None:
    (setup / "turns.py").write_text(TURNS)
    tasks = str(setup / "tasks.jsonl")
    environments = [
        {"name": f"{setup / 'turns.py'}:Turns", "as": "turns", "tasks": tasks},
        {"name": "dataset", "as": "vowels", "tasks": tasks, "grader": "contains", "weight": 0.5},
    ]
    sampler = {"max_tokens": 4, "max_length": 64}
    asked = settings(
        setup, tmp_path / "run", environments=environments, sampler=sampler, truncated="mask", iterations=3
    )
    train(asked, log=lambda _: None)
    audit = balanced(tmp_path / "run")
    places = {place.name: place for place in audit.places if place.split == "train"}
    assert {"trained", "failed", "truncated"} <= places.keys()
    assert places["truncated"].turns > places["truncated"].rollouts
    assert {compared.name for compared in audit.comparisons} >= {"failed", "truncated"}
    path = tmp_path / "run" / SUMMARIES
    edit_lines(path, lambda lines: [line.replace(b'["turns"]', b'["vowels"]') for line in lines])
    assert found_in(tmp_path / "run", Kind.DIFFERS, SUMMARIES, "the schedule has drawn 'turns'")


def test_a_file_of_another_run_is_named_with_that_run(killed: Path, other: Path, tmp_path: Path) -> None:
    run = copy_of(killed, tmp_path / "run")
    shutil.copy(other / SUMMARIES, run / SUMMARIES)
    audit = rollbook.audit(run)
    assert rollbook.open_run(other).id in found(audit, Kind.FOREIGN, SUMMARIES).what
    assert (audit.verdict, audit.exit_code) == ("unbalanced", 1)
    shutil.copy(killed / SUMMARIES, run / SUMMARIES)
    stray = run / "train_iteration_000099_rollout_summaries.jsonl"
    shutil.copy(other / SUMMARIES, stray)
    assert rollbook.open_run(other).id in found(rollbook.audit(run), Kind.FOREIGN, stray.name).what
    stray.unlink()
    balanced(run)
    shutil.copy(other / EXPORT, run / EXPORT)
    assert [finding for finding in rollbook.audit(run).findings if finding.kind is Kind.FOREIGN]


def test_no_file_elsewhere_is_opened(killed: Path, tmp_path: Path) -> None:
    """What a line says is a name, not a place to read from."""
    run = copy_of(killed, tmp_path / "run")
    secret = tmp_path / "secret_rollout_summaries.jsonl"
    secret.write_text("something private\n")

    def name_it(row: dict[str, Any]) -> None:
        row["files"] = {str(secret): {"bytes": 1, "xxh3_128": ""}, "../secret": {"bytes": 1, "xxh3_128": ""}}

    edit_row(run / ITERATIONS, 3, name_it)
    audit = rollbook.audit(run)
    assert found_in(run, Kind.DIFFERS, ITERATIONS, "no file of an iteration")
    assert "private" not in str(audit)


def test_every_process_is_accounted_for(setup: Path, tmp_path: Path) -> None:
    asked = settings(setup, tmp_path / "run", processes=2, iterations=2, export={"fraction": 0.5})
    environment = {"ROLLBOOK_SETTINGS": msgspec.json.encode(asked).decode()}
    run_several(2, "rollbook.rl.main", "--artifacts", tmp_path / "artifacts", **environment)
    run = tmp_path / "run"
    audit = balanced(run)
    trained = sum(place.tokens for place in audit.places if place.name == "trained")
    assert [share.rank for share in audit.ranks] == [0, 1]
    assert sum(share.tokens for share in audit.ranks) == 2 * trained  # two passes
    assert 0 < sum(share.exported or 0 for share in audit.ranks) < sum(share.rows for share in audit.ranks)
    second = run / "token_exports/rank_1.jsonl"
    lines = second.read_bytes()
    second.unlink()
    audit = rollbook.audit(run)
    found(audit, Kind.MISSING, "token_exports/rank_1.jsonl")
    assert (audit.verdict, audit.exit_code) == ("incomplete", 3)
    shutil.copy(run / EXPORT, second)  # the records of the other process under its name
    assert [
        finding for finding in rollbook.audit(run).findings if finding.file == "token_exports/rank_1.jsonl"
    ]
    second.write_bytes(lines)
    check_that_processes_are_complete_each(run)
    edit_row(run / "iterations.jsonl", 2, lambda row: row["steps"][0].update(processes=[9, 0]))
    assert found_in(run, Kind.DIFFERS, "iterations.jsonl", "its processes took [9, 0]")


def check_that_processes_are_complete_each(run: Path) -> None:
    """Where one has written nothing, a record that the other one lost is named all the same."""
    before = {path: path.read_bytes() for path in (run / "token_exports").iterdir()}

    def stop(row: dict[str, Any]) -> None:
        first, second = row["ranks"]
        lost = {"records": 0, "tokens": 0, "trained_tokens": 0, "file": None, "end": 0}
        row |= {name: second[name] for name in ("records", "tokens", "trained_tokens")} | {"complete": False}
        first |= lost | {"complete": False, "error": "the disk is full"}

    assert json.loads((run / MANIFEST).read_bytes().splitlines()[0])["ranks"][0]["complete"]
    edit_row(run / MANIFEST, 1, stop)
    drop_line(run / "token_exports/rank_1.jsonl", 1)
    findings = rollbook.audit(run).findings
    (told,) = [finding for finding in findings if finding.what.startswith("process 0 has written 0 of ")]
    assert told.what.endswith("of iteration 0: the disk is full") and "rollbook replay" in told.next
    assert told.file == MANIFEST and not any(one.what.startswith("process 1") for one in findings)
    lost = [one.file for one in findings if "has no record here" in one.what]
    assert lost == ["token_exports/rank_1.jsonl"]
    for path, data in before.items():
        path.write_bytes(data)


def found_in(run: Path, kind: Kind, file: str, words: str) -> bool:
    return any(
        finding.kind is kind and finding.file == file and words in finding.what
        for finding in rollbook.audit(run).findings
    )


def test_a_run_that_was_killed_is_incomplete_and_says_how_to_go_on(setup: Path, tmp_path: Path) -> None:
    asked = settings(setup, tmp_path / "run", export={"format": "parquet"})
    with start(asked, kill_at="half write train_iteration_N_transcripts.jsonl", nth=60) as trainer:
        assert trainer.wait() == -9, trainer.output
    audit = rollbook.audit(tmp_path / "run")
    assert (audit.verdict, audit.exit_code, audit.done) == ("incomplete", 3, 2)
    assert all(finding.kind is Kind.MISSING for finding in audit.findings), audit.findings
    assert any("rollbook rl" in finding.next and "--resume" in finding.next for finding in audit.findings)
    unfinished = rollouts_of(audit, "unfinished")
    assert unfinished == 59 - 2 * 24
    finish(asked, "--resume")
    audit = balanced(tmp_path / "run")
    assert rollouts_of(audit, "superseded") == unfinished


def rollouts_of(audit: Audit, name: str) -> int:
    return next(place.rollouts for place in audit.places if (place.split, place.name) == ("train", name))


def test_checkpoints_stand_for_what_was_saved(killed: Path, tmp_path: Path) -> None:
    run = copy_of(killed, tmp_path / "run")
    weights = run / "checkpoints/000004/model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    balanced(run)  # the size is the same, and bytes are only read when asked
    found(rollbook.audit(run, verify=True), Kind.DIFFERS, "checkpoints.jsonl", key="000004")
    weights.unlink()
    audit = rollbook.audit(run)
    assert (
        "model.safetensors is missing" in found(audit, Kind.MISSING, "checkpoints.jsonl", key="000004").what
    )


def test_checkpoints_that_the_run_rotated_away_are_not_missed(setup: Path, tmp_path: Path) -> None:
    asked = settings(setup, tmp_path / "run", save_every=1, save_total_limit=1, evals=[], iterations=3)
    train(asked, log=lambda _: None)
    balanced(tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/000003")
    found(rollbook.audit(tmp_path / "run"), Kind.MISSING, "checkpoints.jsonl", key="000003")


def test_settings_that_change_on_resume_do_not_unbalance(setup: Path, tmp_path: Path) -> None:
    """Evaluations and exports are due from when they were asked for, not before."""
    log_path = tmp_path / "run"
    train(settings(setup, log_path, export=False, evals=[], iterations=2), log=lambda _: None)
    balanced(log_path)
    train(settings(setup, log_path), resume=True, log=lambda _: None)
    audit = balanced(log_path)
    assert {place.name for place in audit.places if place.split == "eval"} == {"evaluated"}
    drop_line(log_path / "iterations.jsonl", 3)
    assert found_in(log_path, Kind.MISSING, "iterations.jsonl", "eval/test is due at iteration 2")


def test_a_run_that_is_being_written_never_looks_damaged(setup: Path, tmp_path: Path) -> None:
    seen = set()
    with start(settings(setup, tmp_path / "run", iterations=8)) as trainer:
        while trainer.is_alive():
            if not (tmp_path / "run/run.json").exists():
                continue
            audit = rollbook.audit(tmp_path / "run")
            seen.add(str(audit.verdict))
            assert all(finding.kind is Kind.MISSING for finding in audit.findings), audit.findings
        assert trainer.wait() == 0, trainer.output
    assert "running" in seen
    balanced(tmp_path / "run")


def test_the_command_prints_a_verdict_and_exits_with_it(
    killed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["audit", str(killed)])
    printed = capsys.readouterr()
    assert ended.value.code == 0
    assert printed.out.splitlines()[-1].startswith("balanced:")
    run = copy_of(killed, tmp_path / "run")
    edit_row(run / TRANSCRIPTS, 1, lambda row: row.update(task_id="\x1b[2J evil"))
    with pytest.raises(SystemExit) as ended:
        main(["audit", str(run)])
    printed = capsys.readouterr()
    assert ended.value.code == 1 and printed.out.splitlines()[-1].startswith("unbalanced:")
    assert "\x1b" not in printed.out and "evil" in printed.out and f"{TRANSCRIPTS}:1" in printed.out
    with pytest.raises(SystemExit) as ended:
        main(["audit", str(run), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["verdict"] == "unbalanced" and told["findings"][0]["file"] == TRANSCRIPTS
