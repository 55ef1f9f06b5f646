"""Any log of a run has its length in every checkpoint and is cut back to it; all are under one lock."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollbook import Run, Trajectory, open_run
from rollbook.errors import UsageError
from rollbook.records.iterations import Fate, IterationRecord, RolloutFate, TrainRow, TrainStep
from rollbook.records.jsonl import JsonlWriter
from rollbook.runs.finished import Again


def rows(path: Path) -> list[int]:
    return [json.loads(line)["i"] for line in path.read_text().splitlines()]


def rollout(run: Run, iteration: int, split: str = "train", text: str = "a") -> None:
    with run.rollouts(iteration, split) as rollouts, rollouts.group(0) as group:
        group.add(Trajectory.single_turn("q", text, 1.0))


def test_a_log_of_the_loop_is_cut_back_with_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path)
    exports = run.append_log("token_exports/rank_0.jsonl")
    assert run.append_log("token_exports/rank_0.jsonl") is exports
    other_rank = JsonlWriter(tmp_path / "token_exports/rank_1.jsonl")
    for i in range(4):
        for log in (exports, other_rank):
            log.append(b'{"i": %d}' % i)
        if i == 1:
            run.record_checkpoint("two", batch=2)
    run.append_log("late.jsonl").append(b'{"i": 0}')
    run.close()
    other_rank.close()
    (record,) = open_run(tmp_path).checkpoints()
    assert record.log_lengths["token_exports/rank_1.jsonl"] == len('{"i": 0}\n') * 2

    with Run(tmp_path, resume=True) as run:
        exports = run.append_log("token_exports/rank_0.jsonl")
        assert rows(tmp_path / "token_exports/rank_0.jsonl") == [0, 1]
        assert rows(tmp_path / "token_exports/rank_1.jsonl") == [0, 1]
        assert (tmp_path / "late.jsonl").read_bytes() == b""
        exports.append(b'{"i": 2}')
    assert rows(tmp_path / "token_exports/rank_0.jsonl") == [0, 1, 2]
    (tail,) = (tmp_path / "superseded/attempt_001/token_exports").glob("rank_0.jsonl.from_byte_*")
    assert rows(tail) == [2, 3]


def test_lengths_of_other_machines_can_be_given(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        run.append_log("rank_0.jsonl")
        record = run.record_checkpoint("one", batch=1, log_lengths={"rank_1.jsonl": 70})
    assert record.log_lengths["rank_1.jsonl"] == 70


@pytest.mark.parametrize(
    "name", ["", "/tmp/x.jsonl", "../x.jsonl", "a/../../x.jsonl", "a//b.jsonl", "./x.jsonl", "a/"]
)
def test_a_log_is_below_the_run(tmp_path: Path, name: str) -> None:
    with Run(tmp_path) as run, pytest.raises(UsageError, match="plain path below"):
        run.append_log(name)


@pytest.mark.parametrize(
    "name",
    [
        "metrics.jsonl",
        "run.json",
        "checkpoints/x.jsonl",
        "superseded/x.jsonl",
        "train_iteration_000000_transcripts.jsonl",
        "iteration_000001/eval_a_transcripts.jsonl",
    ],
)
def test_files_of_the_run_itself_are_no_logs(tmp_path: Path, name: str) -> None:
    with Run(tmp_path) as run, pytest.raises(UsageError, match="written by the run itself"):
        run.append_log(name)


def test_a_missing_log_is_named(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        run.append_log("extra.jsonl").append(b'{"i": 0}')
        run.record_checkpoint("one", batch=1)
    (tmp_path / "extra.jsonl").unlink()
    with pytest.raises(Exception, match=r"extra\.jsonl: is 0 bytes long"):
        Run(tmp_path, resume=True)


def test_one_lock_holds_the_whole_run(tmp_path: Path) -> None:
    code = f"""
import os, signal, rollbook
run = rollbook.Run({str(tmp_path)!r}, code={str(tmp_path)!r})
run.append_log("extra.jsonl")
with run.rollouts(0), run.rollouts(0, "eval/test"):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", code])
    assert killed.returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.rglob("*.lock")] == [".run.json.lock"]
    with Run(tmp_path, resume=True):
        pass
    assert list(tmp_path.rglob("*.lock")) == []


def test_half_an_evaluation_does_not_survive_a_resume(tmp_path: Path) -> None:
    """It is of an iteration before the checkpoint, and was begun after it."""
    code = f"""
import os, signal
from rollbook import Run, Trajectory
run = Run({str(tmp_path)!r}, code={str(tmp_path)!r})
for i in range(3):
    with run.rollouts(i) as rollouts, rollouts.group(0) as group:
        group.add(Trajectory.single_turn("q", "a", 1.0))
with run.rollouts(0, "eval/early") as rollouts, rollouts.group(0) as group:
    group.add(Trajectory.single_turn("q", "a", 1.0))
open_at_checkpoint = run.rollouts(1, "eval/slow")
with open_at_checkpoint.__enter__().group(0, size=4) as group:
    group.add(Trajectory.single_turn("q", "a", 1.0))
run.record_checkpoint("000003", batch=3)
late = run.rollouts(1, "eval/late")
with late.__enter__().group(0, size=4) as group:
    group.add(Trajectory.single_turn("q", "a", 1.0))
    os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", code])
    assert killed.returncode == -signal.SIGKILL
    with Run(tmp_path, resume=True) as run:
        assert run.next_iteration == 3
    reader = open_run(tmp_path)
    assert [(found.iteration, found.split) for found in reader.iterations()] == [
        (0, "eval/early"),
        (0, "train"),
        (1, "train"),
        (2, "train"),
    ]
    kept = {path.name for path in (tmp_path / "superseded/attempt_001").iterdir()}
    assert "eval_late_iteration_000001_transcripts.jsonl" in kept
    assert "eval_slow_iteration_000001_transcripts.jsonl" in kept


@pytest.mark.parametrize("again", ["replace", "append"])
def test_an_evaluation_recorded_again_after_the_checkpoint_comes_back(again: Again, tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        rollout(run, 0, "eval/test", "first answer")
        run.record_checkpoint("one", batch=1)
        with run.rollouts(0, "eval/test", again=again) as rollouts, rollouts.group() as group:
            group.add(Trajectory.single_turn("q", "second", 1.0))
        (tmp_path / "train_iteration_000000.html").write_text("of nobody")
    with Run(tmp_path, resume=True):
        (transcript,) = open_run(tmp_path).transcripts()
        assert transcript.messages[-1]["content"] == "first answer"
        assert not (tmp_path / "train_iteration_000000.html").exists()
    aside = list((tmp_path / "superseded").rglob("eval_test_iteration_000000_transcripts.jsonl*"))
    assert [b"second" in path.read_bytes() for path in aside] == [True]


def test_a_loop_says_what_became_of_its_rollouts(tmp_path: Path) -> None:
    record = IterationRecord(
        split="train",
        iteration=0,
        version=0,
        rollouts=[RolloutFate(0, 0, Fate.TRAINED, 0.1 + 0.2), RolloutFate(0, 1, Fate.FAILED)],
        steps=[TrainStep(micro_batches=[[TrainRow(0, 0)]], learning_rate=1e-4, loss=float("nan"))],
        weights_digest="abc",
    )
    with Run(tmp_path) as run:
        with run.rollouts(0), pytest.raises(UsageError, match="still being recorded"):
            run.finish_iteration(record)
        run.finish_iteration(record)
        rollout(run, 1)
        with pytest.raises(ValueError, match="odd"), run.rollouts(0, "eval/test"):
            raise ValueError("odd")
        run.record_checkpoint("two", batch=2)
        assert (tmp_path / "iterations.jsonl").read_bytes().count(b"\n") == 3
    first, second, third = open_run(tmp_path).finished_iterations()
    assert first.rollouts == record.rollouts
    assert first.steps[0].micro_batches == [[TrainRow(0, 0)]]
    assert first.steps[0].loss is None and first.extra == {"nonfinite": ["steps.0.loss"]}
    assert sorted(first.files) == [
        f"train_iteration_000000{part}"
        for part in (".html", "_logtree.json", "_rollout_summaries.jsonl", "_transcripts.jsonl")
    ]
    facts = first.files["train_iteration_000000_transcripts.jsonl"]
    assert facts.bytes == 0 and facts.xxh3_128 == "99aa06d3014798d86001c324468d497f"  # of nothing
    assert (second.split, second.iteration, second.rollouts, second.error) == ("train", 1, None, None)
    assert (third.split, third.error) == ("eval/test", "ValueError: odd")


def test_a_run_of_an_older_version_is_rewound_by_number(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        rollout(run, 0)
        rollout(run, 1, "eval/test")
        run.record_checkpoint("one", batch=1)
        rollout(run, 1)
    names = ["alerts.jsonl", "metrics.jsonl"]
    names += [path.name for path in tmp_path.glob("eval_test_iteration_000001*")]
    (line,) = [json.loads(line) for line in (tmp_path / "checkpoints.jsonl").read_text().splitlines()]
    line["log_lengths"] = {name: (tmp_path / name).stat().st_size for name in names}
    (tmp_path / "checkpoints.jsonl").write_text(json.dumps(line) + "\n")
    (tmp_path / "iterations.jsonl").unlink()
    with Run(tmp_path, resume=True):
        found = [(found.iteration, found.split) for found in open_run(tmp_path).iterations()]
    assert found == [(0, "train"), (1, "eval/test")]
