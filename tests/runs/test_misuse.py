"""What loops do that nobody planned for: odd arguments, threads, forks, names used twice."""

from __future__ import annotations

import json
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from rollbook import Run, Step, Trajectory, open_run
from rollbook.errors import BadFileError, BadLineError, UsageError


def one(text: str = "a", reward: float = 1.0) -> Trajectory:
    return Trajectory.single_turn("q", text, reward)


def test_an_evaluation_recorded_again_after_each_resume(tmp_path: Path) -> None:
    for attempt, text in enumerate(["a long answer " * 50, "short", "a much longer answer " * 90]):
        run = Run(tmp_path, resume=True)
        with run.rollouts(5, "eval/t") as rollouts, rollouts.group() as group:
            group.add(one(text))
        if attempt == 0:
            run.record_checkpoint("000005", batch=5, state_path="tinker://elsewhere")
        run.close()
    (transcript,) = open_run(tmp_path).transcripts()
    assert transcript.messages[-1]["content"] == "a much longer answer " * 90
    open_run(tmp_path).logtree(5, "eval/t")


def test_resume_without_a_complete_checkpoint_is_refused(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        run.log_metrics({"loss": 1.0}, 0)
        with run.checkpoint("000001", batch=1) as directory:
            (directory / "weights").write_text("w")
    (tmp_path / "checkpoints/000001/COMPLETE").unlink()
    with pytest.raises(UsageError, match="none of its 1 checkpoints is complete"):
        Run(tmp_path, resume=True)
    assert len(list(open_run(tmp_path).metrics)) == 1
    with Run(tmp_path, resume="start-over") as run:
        assert run.next_iteration == 0
    assert list(open_run(tmp_path).metrics) == []


def test_a_checkpoint_that_is_not_there_is_not_recorded(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        for path in ("checkpoints/000010", "elsewhere/w"):
            with pytest.raises(UsageError, match="save first"):
                run.record_checkpoint("000010", batch=10, state_path=path)
        with pytest.raises(UsageError, match="text"):
            run.record_checkpoint(10, batch=10)  # type: ignore[arg-type]
        run.record_checkpoint("a", batch=np.int64(1))
        with pytest.raises(UsageError, match="already recorded"):
            run.record_checkpoint("a", batch=2)
        with pytest.raises(UsageError, match="rename"), run.checkpoint("b", batch=2, state_path="x"):
            pass
    assert [c.batch for c in open_run(tmp_path).checkpoints()] == [1]


def test_a_resumed_checkpoint_under_another_name_stays(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        directory = tmp_path / "checkpoints/step_10"
        directory.mkdir(parents=True)
        (directory / "COMPLETE").touch()
        (tmp_path / "checkpoints/.DS_Store").touch()
        run.record_checkpoint("000010", batch=10, state_path="checkpoints/step_10")
    with Run(tmp_path, resume=True) as run:
        assert run.next_iteration == 10
    assert directory.exists()


def test_a_name_to_resume_from_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no checkpoint '000010'"):
        Run(tmp_path, resume="000010")


def test_a_loop_that_changes_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Run("runs/a") as run:
        monkeypatch.chdir("/")
        run.log_metrics({"loss": 1.0}, 0)
        with run.rollouts(0) as rollouts, rollouts.group() as group:
            group.add(one())
    run_directory = tmp_path / "runs/a"
    assert len(list(open_run(run_directory).rollouts())) == 1
    with pytest.raises(UsageError, match="log_path is empty"):
        Run("")


def test_groups_in_threads_are_all_in_the_report(tmp_path: Path) -> None:
    with Run(tmp_path, num_groups_to_log=4) as run, run.rollouts(0) as rollouts:

        def work(index: int) -> None:
            with rollouts.group(index, task_id=f"t{index}") as group:
                group.add(one(reward=index / 8))

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(8)))
    text = (tmp_path / "train_iteration_000000_logtree.json").read_text()
    assert text.count('"Trajectory Details"') == 8
    assert text.count('"type":"conversation"') == 4
    assert all(f'"data-task-id":"t{index}"' in text for index in range(8))


def test_one_group_from_many_threads(tmp_path: Path) -> None:
    with (
        Run(tmp_path) as run,
        run.rollouts(0) as rollouts,
        rollouts.group(0) as group,
        ThreadPoolExecutor(8) as pool,
    ):
        list(pool.map(lambda _: group.add(one()), range(200)))
    assert sorted(r.traj_idx for r in open_run(tmp_path).rollouts()) == list(range(200))


def test_odd_arguments_are_coerced_or_refused_and_the_files_stay_readable(tmp_path: Path) -> None:
    with Run(tmp_path, total_iterations=1e3) as run:
        run.log_metrics({1: 0.5, "loss": 1.0}, step=np.int64(3))
        with pytest.raises(UsageError, match="whole number"):
            run.log_metrics({"loss": 1.0}, step="5")
        with pytest.raises(UsageError, match="logged_at"):
            run.log_metrics({"logged_at": 1.0}, step=4)
        with run.rollouts(0) as rollouts, rollouts.group(0, task_id=17, tags="math") as group:
            group.add(Trajectory(steps=[Step(ob_len=3.5, ac_len=np.int32(2))], stop_reason=2))
            group.add(Trajectory(steps=[Step(reward=None)]))
        with pytest.raises(UsageError, match="info, warning, error"):
            run.alert("x", level="critical")
    run_read = open_run(tmp_path)
    assert [row["step"] for row in run_read.metrics] == [3]
    first, second = run_read.rollouts()
    assert (first.task_id, first.tags, first.stop_reason, first.steps[0].ob_len) == ("17", ["math"], "2", 3)
    assert second.total_reward is None


def test_our_own_metric_names_are_kept(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        run.log_metrics({"learning_rate": 0.1, "progress": 0.5, "big": 2**63}, 0)
    (row,) = open_run(tmp_path).metrics
    assert row["learning_rate"] == 0.1 and "optim/lr" not in row
    assert open_run(tmp_path).metrics.to_arrow().num_rows == 1


def test_an_environments_metric_cannot_replace_the_reward(tmp_path: Path) -> None:
    with Run(tmp_path) as run, run.rollouts(0) as rollouts, rollouts.group() as group:
        group.add(Trajectory(steps=[Step(reward=1.0, metrics={"reward/total": 5.0})]))
    assert rollouts.metrics()["env/all/reward/total"] == 1.0


def test_the_same_iteration_twice_at_once_is_refused_and_nothing_moves(tmp_path: Path) -> None:
    with Run(tmp_path) as run, run.rollouts(0) as rollouts:
        with rollouts.group() as group:
            group.add(one())
        with pytest.raises(UsageError, match="being recorded"), run.rollouts(0):
            pass
    assert len(list(open_run(tmp_path).rollouts())) == 1


def test_a_report_beside_recorded_rollouts_keeps_them(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        with run.rollouts(0) as rollouts, rollouts.group() as group:
            group.add(one())
        with run.report(0, title="mine"):
            pass
    assert len(list(open_run(tmp_path).rollouts())) == 1


def test_a_failure_without_a_size_is_recorded_and_keeps_no_secret(tmp_path: Path) -> None:
    key = "sk-" + "a1B2" * 10
    with (
        pytest.raises(PermissionError),
        Run(tmp_path) as run,
        run.rollouts(0) as rollouts,
        rollouts.group(0),
    ):
        raise PermissionError(f"401 for Authorization: Bearer {key}")
    (failed,) = open_run(tmp_path).rollouts()
    assert failed.status == "error"
    assert all(key not in path.read_text() for path in tmp_path.rglob("*") if path.is_file())


def test_a_step_may_be_used_again(tmp_path: Path) -> None:
    step = Step(ac_len=1)
    with Run(tmp_path) as run, run.rollouts(0) as rollouts, rollouts.group() as group:
        group.add(Trajectory(steps=[step, step]))
    (rollout,) = open_run(tmp_path).rollouts()
    assert [s.step_idx for s in rollout.steps] == [0, 1]


def test_a_forked_child_leaves_the_run_alone(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        child = os.fork()
        if child == 0:
            run.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert open_run(tmp_path).attempts[0].ended_at is None
    assert open_run(tmp_path).attempts[0].outcome == "completed"


def test_after_close_nothing_is_taken(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.close()
    with pytest.raises(UsageError, match="closed"), run.rollouts(0):
        pass
    with pytest.raises(UsageError, match="closed"), run.checkpoint("a", batch=1):
        pass


def test_one_bad_line_does_not_end_a_watch(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        run.log_metrics({"loss": 1.0}, 0)
        run.alert("look")
    follower = open_run(tmp_path).follow()
    with (tmp_path / "checkpoints.jsonl").open("a") as file:
        file.write("garbage\n")
    updates = {update.source: update for update in follower.poll()}
    assert len(updates["metrics"].records) == 1 and len(updates["alerts"].records) == 1
    assert updates["checkpoints"].errors[0].line == 1


def test_errors_cross_process_pools() -> None:
    for error in (BadLineError(Path("a"), 3, "bad"), BadFileError(Path("b"), "worse")):
        assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_conversations_name_the_split_as_records_do(tmp_path: Path) -> None:
    with Run(tmp_path) as run, run.rollouts(0, "eval/my eval/(v1)") as rollouts, rollouts.group() as group:
        group.add(one())
    (conversation,) = open_run(tmp_path).conversations()
    assert conversation.split == "eval/my eval/(v1)"
    assert json.loads((tmp_path / "eval_my_eval_v1_iteration_000000_transcripts.jsonl").read_text())
