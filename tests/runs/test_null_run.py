"""Processes other than the first have the same methods, and write only logs of their own."""

from __future__ import annotations

import inspect
from pathlib import Path

from rollbook import Run, Trajectory, open_run
from rollbook.records.complete import is_complete
from rollbook.records.iterations import IterationRecord
from rollbook.runs.null_run import NullRun, open_writer


def methods(kind: type) -> set[str]:
    return {name for name, value in inspect.getmembers(kind) if callable(value) and not name.startswith("_")}


def loop(run: Run | NullRun, rank: int) -> None:
    """What every process of a job executes."""
    exports = run.append_log(f"token_exports/rank_{rank}.jsonl")
    shared = run.append_log("samples.jsonl")
    for i in range(run.next_iteration, 2):
        with run.rollouts(i) as rollouts, rollouts.group(0, size=2, tags=["math"]) as group:
            group.add(Trajectory.single_turn("q", "a", 1.0))
            with group.trajectory(1):
                group.fail("odd", 1)
        exports.append(b'{"step": %d}' % i)
        shared.append(b"{}")
        run.log_metrics(rollouts.metrics(), step=i)
        run.finish_iteration(IterationRecord(split="train", iteration=i))
        run.alert("look", step=i)


def test_the_others_have_the_same_methods_and_leave_only_their_logs(tmp_path: Path) -> None:
    assert methods(Run) <= methods(NullRun)
    with open_writer(tmp_path, rank=0, kind="rl", total_iterations=2) as first:
        other = open_writer(tmp_path, rank=1)
        assert isinstance(first, Run) and isinstance(other, NullRun)
        loop(first, 0)
        before = {path for path in tmp_path.rglob("*") if path.is_file()}
        loop(other, 1)
        with first.checkpoint("two", batch=2, log_lengths=other.log_lengths()) as directory:
            with other.checkpoint("two", batch=2) as same:
                (same / "part_1").write_text("of rank 1")
            (directory / "part_0").write_text("of rank 0")
        written = {path for path in tmp_path.rglob("*") if path.is_file()} - before
        assert is_complete(tmp_path / "checkpoints/two", verify=True)
        assert (tmp_path / "checkpoints/two/part_1").exists()
        own = tmp_path / "token_exports/rank_1.jsonl"
        assert {path for path in written if "checkpoints/" not in str(path) and path.suffix != ".lock"} == {
            own
        }
        own_text = own.read_text()
        other.append_log("token_exports/rank_1.jsonl").append(b'{"step": 2}')
        other.close()
        assert other.record_checkpoint("x", batch=3) is None
        assert not other.restore_random_state()
    assert len((tmp_path / "samples.jsonl").read_bytes().splitlines()) == 2
    assert len(list(open_run(tmp_path).metrics)) == 2
    with open_writer(tmp_path, resume=True) as first:
        assert first.next_iteration == 2
        assert own.read_text() == own_text
