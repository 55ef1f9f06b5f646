"""An iteration recorded in two blocks: refused, unless the loop says what becomes of the first."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollbook import Run, open_run
from rollbook.errors import UsageError
from rollbook.records.iterations import read_iterations
from rollbook.records.rollouts import Trajectory


def record(run: Run, text: str, iteration: int = 0, **options: str) -> dict[str, float]:
    with run.rollouts(iteration, **options) as rollouts, rollouts.group() as group:
        group.add(Trajectory.single_turn("2 + 2?", text, float(len(text))))
    return rollouts.metrics()


def said(path: Path) -> list[tuple[int, str]]:
    return [(t.group_idx, t.messages[-1]["content"]) for t in open_run(path).transcripts()]


def test_without_a_word_it_is_refused_and_the_first_stays(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        record(run, "first")
        before = {path: path.read_bytes() for path in tmp_path.glob("train_*")}
        with pytest.raises(UsageError, match=r"iteration 0 of 'train' is recorded already.*again='append'"):
            record(run, "second")
        assert {path: path.read_bytes() for path in tmp_path.glob("train_*")} == before
        record(run, "second", iteration=1)
        record(run, "eval", split="eval/test")
        with pytest.raises(UsageError, match="it is 'append' or 'replace'"):
            record(run, "x", again="maybe")
    assert not (tmp_path / "superseded").exists()


def test_append_adds_groups_metrics_and_a_report_of_all(tmp_path: Path) -> None:
    with Run(tmp_path, num_groups_to_log=4) as run:
        record(run, "one")
        metrics = record(run, "three", again="append")
        record(run, "three!", again="append")
    assert said(tmp_path) == [(0, "one"), (1, "three"), (2, "three!")]
    assert metrics["env/all/reward/total"] == 4.0
    assert metrics["env/all/rollouts/expected"] == 2
    page = (tmp_path / "train_iteration_000000.html").read_text()
    assert all(f"Group {number}" in page for number in range(3))
    (line,) = read_iterations(tmp_path / "iterations.jsonl")
    assert line.iteration == 0
    assert (tmp_path / "train_iteration_000000_transcripts.jsonl").stat().st_size == next(
        facts.bytes for name, facts in line.files.items() if "transcripts" in name
    )


def test_append_where_nothing_was_recorded_begins(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        record(run, "one", again="append")
    assert said(tmp_path) == [(0, "one")]


def test_replace_sets_the_first_aside(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        record(run, "first")
        record(run, "second", again="replace")
    assert said(tmp_path) == [(0, "second")]
    kept = tmp_path / "superseded/attempt_001/train_iteration_000000_transcripts.jsonl"
    assert "first" in kept.read_text()


def test_after_an_exception_it_is_tried_again(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        with pytest.raises(RuntimeError), run.rollouts(0):
            raise RuntimeError("the sampler is gone")
        record(run, "second")
    assert said(tmp_path) == [(0, "second")]


def test_a_resumed_iteration_works(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), Run(tmp_path) as run:
        record(run, "zero")
        record(run, "early eval", iteration=1, split="eval/test")
        with run.checkpoint("000001", batch=1):
            pass
        record(run, "one, lost", iteration=1)
        raise RuntimeError
    with Run(tmp_path, resume=True) as run:
        assert run.next_iteration == 1
        record(run, "eval again", iteration=1, split="eval/test")
        record(run, "one", iteration=1)
    assert sorted(said(tmp_path)) == [(0, "eval again"), (0, "one"), (0, "zero")]


def test_lengths_that_are_not_given_are_unknown(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        metrics = record(run, "four")
        with run.rollouts(1) as rollouts, rollouts.group() as group:
            group.add(Trajectory.single_turn("2 + 2?", "4", 1.0, ob_len=9, ac_len=0))
            group.add(Trajectory.single_turn("2 + 2?", "4", 1.0))
    assert not any("ac_tokens" in name or "ob_tokens" in name for name in metrics if ":" not in name)
    counted = rollouts.metrics()
    assert (counted["env/all/total_ob_tokens"], counted["env/all/ob_tokens_per_turn"]) == (9, 9.0)
    first, known, unknown = open_run(tmp_path).rollouts()
    assert [(r.steps[0].ob_len, r.steps[0].ac_len, r.final_ob_len) for r in (first, known, unknown)] == [
        (None, None, None),
        (9, 0, None),
        (None, None, None),
    ]
    text = (tmp_path / "train_iteration_000000_rollout_summaries.jsonl").read_text()
    assert '"ob_len":null,"ac_len":null' in text and '"final_ob_len":null' in text
