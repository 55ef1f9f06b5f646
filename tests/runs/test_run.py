"""What a training loop writes, and what happens when it goes wrong."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import rollbook
from rollbook import Run, Step, Trajectory, logtree, open_run
from rollbook.errors import LockedError, UsageError


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def answer(text: str, reward: float, **more: object) -> Trajectory:
    return Trajectory.single_turn(
        "What is 2 + 2?", text, reward, ob_len=9, ac_len=3, stop_reason="stop", **more
    )


def test_metrics_line(tmp_path: Path) -> None:
    with Run(tmp_path, total_iterations=4) as run:
        run.log_metrics(
            {"loss": np.float32(0.5), "bad": math.inf, "worse": np.float64("nan"), "n": np.int64(3)}, 1
        )
    (row,) = lines(tmp_path / "metrics.jsonl")
    assert list(row)[:3] == ["step", "progress/batch", "progress/done_frac"]
    assert (row["step"], row["progress/batch"], row["progress/done_frac"]) == (1, 1, 0.5)
    assert (row["loss"], row["bad"], row["worse"], row["n"]) == (0.5, None, None, 3)
    assert row["nonfinite"] == ["bad", "worse"]
    assert row["logged_at"].endswith("Z")


def test_ids_join_across_files(tmp_path: Path) -> None:
    with Run(tmp_path) as run, run.rollouts(iteration=0) as rollouts:
        for index in (4, 2):
            with rollouts.group(index, task_id=f"task-{index}") as group:
                group.add(answer("4", 1.0))
                group.add(answer("5", 0.0))
    base = tmp_path / "train_iteration_000000"
    keys = ("run_id", "split", "iteration", "group_idx", "traj_idx", "task_id", "status", "total_reward")
    summaries = lines(Path(f"{base}_rollout_summaries.jsonl"))
    transcripts = lines(Path(f"{base}_transcripts.jsonl"))
    assert [[s[k] for k in keys] for s in summaries] == [[t[k] for k in keys] for t in transcripts]
    assert [(s["group_idx"], s["traj_idx"]) for s in summaries] == [(2, 0), (2, 1), (4, 0), (4, 1)]
    tree = logtree.read(Path(f"{base}_logtree.json"))
    found = {(f.ids["group_idx"], f.ids["traj_idx"]) for f in logtree.find_conversations(tree.root)}
    assert found == {("4", "0"), ("4", "1"), ("2", "0"), ("2", "1")}
    assert [m.get("step_idx") for m in transcripts[0]["messages"]] == [None, 0]


def test_a_failed_group_shifts_nothing_and_is_recorded(tmp_path: Path) -> None:
    with Run(tmp_path) as run, run.rollouts(iteration=0) as rollouts:
        for index in range(3):
            try:
                with rollouts.group(index, task_id=f"t{index}", size=2) as group:
                    group.add(answer("4", 1.0))
                    if index == 1:
                        raise TimeoutError("sampler gone")
                    group.add(answer("4", 0.0))
            except TimeoutError:
                continue
    rows = list(open_run(tmp_path).rollouts())
    assert [(r.group_idx, r.traj_idx, r.status) for r in rows] == [
        (0, 0, "ok"),
        (0, 1, "ok"),
        (1, 0, "ok"),
        (1, 1, "error"),
        (2, 0, "ok"),
        (2, 1, "ok"),
    ]
    failed = rows[3]
    assert failed.error == "TimeoutError: sampler gone"
    assert failed.total_reward is None and failed.final_reward is None
    metrics = rollouts.metrics()
    counts = {name: metrics[f"env/all/rollouts/{name}"] for name in ("expected", "ok", "failed", "missing")}
    assert counts == {"expected": 6, "ok": 5, "failed": 1, "missing": 0}
    assert metrics["env/all/reward/total"] == pytest.approx(3 / 5)


def test_missing_trajectories_are_counted(tmp_path: Path) -> None:
    with Run(tmp_path) as run, run.rollouts(0) as rollouts, rollouts.group(0, size=8) as group:
        group.add(answer("4", 1.0))
    assert rollouts.metrics()["env/all/rollouts/missing"] == 7


def test_stop_reasons_are_fractions(tmp_path: Path) -> None:
    with Run(tmp_path) as run, run.rollouts(0) as rollouts, rollouts.group(0) as group:
        for reason in ("stop", "stop", "stop", "length"):
            group.add(Trajectory(steps=[Step(ac_len=1)], stop_reason=reason))
    metrics = rollouts.metrics()
    assert metrics["env/all/stop/stop"] == 0.75
    assert metrics["env/all/stop/length"] == 0.25


def test_eval_metrics_carry_the_name_and_files_do_too(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        with run.rollouts(5, "eval/my eval/(v1)!") as rollouts, rollouts.group(0) as group:
            group.add(answer("4", 1.0))
        with pytest.raises(UsageError, match="rename one"), run.rollouts(5, "eval/my eval v1"):
            pass
    assert rollouts.metrics()["my eval/(v1)!/env/all/reward/total"] == 1.0
    assert (tmp_path / "eval_my_eval_v1_iteration_000005.html").exists()


def test_nested_layout(tmp_path: Path) -> None:
    with Run(tmp_path, layout="nested") as run, run.rollouts(3) as rollouts, rollouts.group() as group:
        group.add(answer("4", 1.0))
    names = {path.name for path in (tmp_path / "iteration_000003").iterdir()}
    assert names == {
        "train.html",
        "train_logtree.json",
        "train_rollout_summaries.jsonl",
        "train_transcripts.jsonl",
    }
    assert [i.iteration for i in open_run(tmp_path).iterations()] == [3]


def test_logged_groups_span_the_rewards_and_details_are_always_there(tmp_path: Path) -> None:
    with Run(tmp_path, num_groups_to_log=3) as run, run.rollouts(0) as rollouts:
        for index in range(9):
            with rollouts.group(index) as group:
                group.add(answer(f"answer {index}", index / 8))
    tree = logtree.read(tmp_path / "train_iteration_000000_logtree.json")
    logged = {f.ids["group_idx"] for f in logtree.find_conversations(tree.root)}
    assert logged == {"0", "4", "8"}
    text = (tmp_path / "train_iteration_000000_logtree.json").read_text()
    assert text.count('"Trajectory Details"') == 9


def test_an_iteration_survives_until_the_kill(tmp_path: Path) -> None:
    code = f"""
import os, signal, rollbook
from rollbook import Trajectory
run = rollbook.Run({str(tmp_path)!r})
with run.rollouts(0) as rollouts:
    with rollouts.group(0) as group:
        group.add(Trajectory.single_turn("q", "a", 1.0))
        os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code], check=False)
    (rollout,) = open_run(tmp_path).rollouts()
    assert rollout.total_reward == 1.0
    (attempt,) = open_run(tmp_path).attempts
    assert attempt.ended_at is None


def test_an_exception_is_in_the_report_and_in_run_json(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Run(tmp_path) as run, run.rollouts(0) as rollouts:
        with rollouts.group(0) as group:
            group.add(answer("4", 1.0))
        1 / 0  # noqa: B018
    assert "ZeroDivisionError" in (tmp_path / "train_iteration_000000.html").read_text()
    (attempt,) = open_run(tmp_path).attempts
    assert (attempt.outcome, attempt.error) == ("failed", "ZeroDivisionError: division by zero")


def test_environment_logs_land_in_their_trajectory(tmp_path: Path) -> None:
    async def rollout(group: object, place: int) -> None:
        with group.trajectory(place):
            await asyncio.sleep(0.001 * (5 - place))
            logtree.text(f"note of {place}")
        group.add(answer("4", 1.0), place)

    async def loop() -> None:
        with Run(tmp_path) as run, run.rollouts(0) as rollouts, rollouts.group(0) as group:
            await asyncio.gather(*(rollout(group, place) for place in range(5)))

    asyncio.run(loop())
    tree = json.loads((tmp_path / "train_iteration_000000_logtree.json").read_text())

    def notes(node: object, owner: str | None = None) -> list[tuple[str | None, str]]:
        if isinstance(node, str):
            return [(owner, node)] if node.startswith("note of") else []
        owner = node["attrs"].get("data-traj-idx", owner)
        return [pair for child in node["children"] for pair in notes(child, owner)]

    assert sorted(notes(tree["root"])) == [(str(place), f"note of {place}") for place in range(5)]


def test_a_failing_rollout_in_its_scope_is_a_record(tmp_path: Path) -> None:
    with Run(tmp_path) as run, run.rollouts(0) as rollouts, rollouts.group(0, size=2) as group:
        with pytest.raises(ValueError, match="boom"), group.trajectory(0):
            raise ValueError("boom")
        group.add(answer("4", 1.0), 1)
    first, second = open_run(tmp_path).rollouts()
    assert (first.traj_idx, first.status, first.error) == (0, "error", "ValueError: boom")
    assert second.status == "ok"


def test_task_id_is_the_hash_of_the_prompt_when_there_is_none(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with Run(tmp_path / name) as run, run.rollouts(0) as rollouts, rollouts.group() as group:
            group.add(answer("4" if name == "a" else "5", 1.0))
    ids = {next(open_run(tmp_path / name).rollouts()).task_id for name in ("a", "b")}
    assert len(ids) == 1 and ids.pop().startswith("sha256:")


def test_nan_reward_is_null_and_named(tmp_path: Path) -> None:
    with Run(tmp_path) as run, run.rollouts(0) as rollouts, rollouts.group() as group:
        group.add(Trajectory(steps=[Step(reward=1.0), Step(reward=float("nan"))]))
    (line,) = lines(tmp_path / "train_iteration_000000_rollout_summaries.jsonl")
    assert line["total_reward"] is None
    assert set(line["nonfinite"]) == {"total_reward", "steps.1.reward"}


def test_second_writer_is_refused_with_the_first_ones_pid(tmp_path: Path) -> None:
    with Run(tmp_path):
        code = f"import rollbook; rollbook.Run({str(tmp_path)!r}, resume=True)"
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert "LockedError" in other.stderr
        import os
        import socket

        assert str(os.getpid()) in other.stderr and socket.gethostname() in other.stderr
        with pytest.raises(LockedError, match="this process"):
            Run(tmp_path, resume=True)


def test_an_existing_run_is_refused_without_resume(tmp_path: Path) -> None:
    Run(tmp_path).close()
    with pytest.raises(UsageError, match="pass resume=True"):
        Run(tmp_path)


def test_another_programs_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(UsageError, match=r"no run\.json"):
        Run(tmp_path, resume=True)


def test_checkpoint_is_complete_or_absent(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        with pytest.raises(RuntimeError), run.checkpoint("000001", batch=1) as directory:
            (directory / "weights").write_text("half")
            raise RuntimeError("cuda went away")
        assert list((tmp_path / "checkpoints").iterdir()) == []
        with run.checkpoint("000002", batch=2, final=True, elapsed_tokens=7) as directory:
            (directory / "weights").write_text("whole")
    assert sorted(p.name for p in (tmp_path / "checkpoints/000002").iterdir()) == [
        "COMPLETE",
        "random_state.json",
        "weights",
    ]
    (line,) = lines(tmp_path / "checkpoints.jsonl")
    assert line["name"] == "000002" and line["final"] is True and line["elapsed_tokens"] == 7
    assert line["state_path"] == "checkpoints/000002"
    with (
        pytest.raises(UsageError, match="not a file name"),
        Run(tmp_path, resume=True).checkpoint("a/b", batch=1),
    ):
        pass


def test_public_names() -> None:
    assert set(dir(rollbook)) == set(rollbook.__all__)
    for name in rollbook.__all__:
        assert getattr(rollbook, name) is not None


def test_reading_imports_neither_torch_nor_pandas(sample_run: Path) -> None:
    code = f"""
import sys, rollbook
run = rollbook.open_run({str(sample_run)!r})
list(run.metrics), list(run.rollouts()), list(run.transcripts()), list(run.conversations()), run.checkpoints()
run.logtree(0); run.config; run.follow().poll()
heavy = {{"torch", "pandas", "numpy", "pyarrow", "duckdb", "transformers", "aiohttp"}} & set(sys.modules)
sys.exit(f"imported {{heavy}}" if heavy else 0)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
