"""A nested run written here, read by the real `tinker_cookbook.stores.TrainingRunStore`.

The other side runs in its own environment (`.venvs/tinker`) and prints what its stores saw; the tests
compare that with what was given to `rollbook.Run`, never with what Rollbook wrote.
"""

from __future__ import annotations

import html
import json
import math
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rollbook
from helpers.rl_runs import config_of, write_setup
from interop.setup_tinker import TINKER
from rollbook import Step, Trajectory

pytestmark = pytest.mark.interop

ITERATIONS = 3
GROUPS = 3
SIZE = 4
EVAL = "my test/(v1)!"
# Characters at which tinker's reader (`str.splitlines`) would cut a line that holds them unescaped.
SEPARATORS = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\x1dh\x1ei\rj\nk"
HOSTILE = '<script>alert("x")</script> & a < b &amp; 日本語 🙂'
CONFIG = {"model_name": "tiny", "loss_fn": "importance_sampling", "learning_rate": 2e-5, "group_size": SIZE}
METRICS = {"entropy": 0.5, "optim/lr": 2e-5, "count": 7, "note": SEPARATORS}


def read_with_tinker(log_path: Path) -> dict[str, Any]:
    if not TINKER.is_ready():
        pytest.fail(".venvs/tinker is missing or out of date; run `make test-interop`", pytrace=False)
    script = Path(__file__).with_name("read_with_tinker.py")
    done = subprocess.run(
        [TINKER.python, script, log_path], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    assert answer["version"].startswith("0.5.")
    return answer


def messages_of(group: int, index: int) -> list[dict[str, Any]]:
    call = {"type": "function", "id": "c1", "function": {"name": "calc", "arguments": '{"e": "2+2"}'}}
    return [
        {"role": "user", "content": f"problem {group} {HOSTILE}"},
        {"role": "assistant", "content": [{"type": "text", "text": SEPARATORS}], "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "c1", "name": "calc"},
        {"role": "assistant", "content": f"answer {index}"},
    ]


def trajectory_of(group: int, index: int) -> Trajectory:
    return Trajectory(
        steps=[
            Step(ob_len=5, ac_len=7 + index, reward=0.25, metrics={"format": 1.0}, logs={"seen": HOSTILE}),
            Step(
                ob_len=30, ac_len=3, reward=float(index % 2), metrics={"correct": 1.0}, logs={"s": SEPARATORS}
            ),
        ],
        messages=messages_of(group, index),
        final_reward=0.5,
        metrics={"length": 2},
        stop_reason="length" if index == 0 else "stop",
        final_ob_len=40,
    )


def summary_of(split: str, iteration: int, group: int, index: int) -> dict[str, Any]:
    """What tinker's own loop would have written for `trajectory_of`."""
    steps = [
        {
            "ob_len": 5,
            "ac_len": 7 + index,
            "reward": 0.25,
            "metrics": {"format": 1.0},
            "logs": {"seen": HOSTILE},
        },
        {
            "ob_len": 30,
            "ac_len": 3,
            "reward": index % 2,
            "metrics": {"correct": 1.0},
            "logs": {"s": SEPARATORS},
        },
    ]
    return {
        "schema_version": 1,
        "split": split,
        "iteration": iteration,
        "group_idx": group,
        "traj_idx": index,
        "tags": ["math", "all"],
        "sampling_client_step": iteration,
        "total_reward": 0.75 + index % 2,
        "final_reward": 0.5,
        "trajectory_metrics": {"length": 2},
        "steps": [{"step_idx": i, "episode_done": i == 1, **step} for i, step in enumerate(steps)],
        "final_ob_len": 40,
    }


def record_rollouts(run: rollbook.Run, iteration: int, split: str, groups: int) -> None:
    with run.rollouts(iteration=iteration, split=split) as rollouts:
        for group_idx in range(groups):
            with rollouts.group(
                group_idx=group_idx,
                task_id=f"task-{group_idx}",
                tags=["math", "all"],
                sampling_client_step=iteration,
                size=SIZE,
            ) as group:
                for index in range(SIZE):
                    group.add(trajectory_of(group_idx, index))


def record_iteration(run: rollbook.Run, iteration: int) -> None:
    record_rollouts(run, iteration, "train", GROUPS)
    if iteration == 1:
        record_rollouts(run, iteration, f"eval/{EVAL}", 1)
    run.log_metrics({**METRICS, "kl": math.nan if iteration == 1 else 0.1}, step=iteration)
    with run.checkpoint(
        f"{iteration + 1:06d}", batch=iteration + 1, final=iteration == ITERATIONS - 1, mood="ok"
    ) as d:
        (d / "weights.bin").write_bytes(b"weights")


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    log_path: Path = tmp_path_factory.mktemp("runs") / "run-a"
    with rollbook.Run(
        log_path, config=CONFIG, kind="rl", layout="nested", total_iterations=ITERATIONS, num_groups_to_log=2
    ) as run:
        for iteration in range(run.next_iteration, ITERATIONS):
            record_iteration(run, iteration)
    # Their registry calls a run with a metrics file younger than two minutes running, whatever else it says.
    long_ago = time.time() - 600
    os.utime(log_path / "metrics.jsonl", (long_ago, long_ago))
    return log_path


@pytest.fixture(scope="module")
def seen(finished_run: Path) -> dict[str, Any]:
    return read_with_tinker(finished_run)


def test_nothing_is_skipped(seen: dict[str, Any]) -> None:
    assert seen["warnings"] == []


def test_registry_finds_a_completed_rl_run(seen: dict[str, Any]) -> None:
    [run] = seen["runs"]
    assert run["run_id"] == "run-a"
    assert run["status"] == "completed"
    assert run["training_type"] == "rl"
    assert run["iteration_count"] == ITERATIONS
    assert run["has_config"] and run["has_metrics"] and run["has_checkpoints"]


def test_config(seen: dict[str, Any]) -> None:
    assert {key: seen["config"][key] for key in CONFIG} == CONFIG


def test_metrics(seen: dict[str, Any]) -> None:
    rows = seen["metrics"]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert [row["progress/batch"] for row in rows] == [0, 1, 2]
    assert rows[-1]["progress/done_frac"] == 1.0
    for row in rows:
        assert {key: row[key] for key in METRICS} == METRICS
    assert [row["kl"] for row in rows] == [0.1, None, 0.1]
    assert set(METRICS) <= set(seen["metric_keys"])


def test_metrics_are_read_incrementally(seen: dict[str, Any]) -> None:
    assert seen["new_metrics"] == seen["metrics"]
    assert seen["new_metrics_again"] == []


def test_list_iterations(seen: dict[str, Any]) -> None:
    assert seen["iterations"] == [
        {
            "iteration": iteration,
            "has_train_rollouts": True,
            "has_train_logtree": True,
            "eval_labels": ["my_test_v1"] if iteration == 1 else [],
        }
        for iteration in range(ITERATIONS)
    ]


def every_rollout_file() -> Iterator[tuple[int, str, str, int]]:
    for iteration in range(ITERATIONS):
        yield iteration, "train", "train", GROUPS
    yield 1, "eval_my_test_v1", f"eval/{EVAL}", 1


@pytest.mark.parametrize(("iteration", "base", "split", "groups"), list(every_rollout_file()))
def test_rollouts(seen: dict[str, Any], iteration: int, base: str, split: str, groups: int) -> None:
    records = seen["by_iteration"][str(iteration)]["rollouts"][base]
    expected = [
        summary_of(split, iteration, group, index) for group in range(groups) for index in range(SIZE)
    ]
    known = [{key: record[key] for key in expected[0]} for record in records]
    assert known == expected
    assert [list(record)[: len(expected[0])] for record in records] == [list(expected[0])] * len(records)
    assert seen["by_iteration"][str(iteration)]["single"][base] == records


def test_added_keys_stay_readable(seen: dict[str, Any]) -> None:
    records = seen["by_iteration"]["0"]["rollouts"]["train"]
    assert {record["task_id"] for record in records} == {"task-0", "task-1", "task-2"}
    assert {record["status"] for record in records} == {"ok"}
    assert [record["stop_reason"] for record in records[:SIZE]] == ["length", "stop", "stop", "stop"]


def test_checkpoints(seen: dict[str, Any]) -> None:
    records = seen["checkpoint_records"]
    assert [(r["name"], r["batch"], r["final"]) for r in records] == [
        ("000001", 1, None),
        ("000002", 2, None),
        ("000003", 3, True),
    ]
    assert [record["extra"]["mood"] for record in records] == ["ok"] * 3
    assert [record["round_trip"] for record in records] == seen["checkpoints"]


def test_their_resume_finds_the_last_checkpoint(seen: dict[str, Any], finished_run: Path) -> None:
    last = seen["last_checkpoint"]
    assert last["name"] == "000003"
    assert (finished_run / last["state_path"] / "weights.bin").read_bytes() == b"weights"


def test_logtrees(seen: dict[str, Any]) -> None:
    for iteration in range(ITERATIONS):
        trees = seen["by_iteration"][str(iteration)]["logtrees"]
        assert sorted(trees) == (["eval_my_test_v1", "train"] if iteration == 1 else ["train"])
        for tree in trees.values():
            assert isinstance(tree["title"], str) and isinstance(tree["started_at"], str)
            assert "path" in tree
            assert_is_node(tree["root"])


def test_logtree_holds_the_conversations(seen: dict[str, Any]) -> None:
    trees = seen["by_iteration"]["1"]["logtrees"]
    [train, evaluation] = [find_conversations(trees[base]["root"]) for base in ("train", "eval_my_test_v1")]
    assert len(train) == 2 * SIZE  # num_groups_to_log
    assert len(evaluation) == SIZE
    assert [bare(conversation["messages"]) for conversation in evaluation] == [
        messages_of(0, index) for index in range(SIZE)
    ]


def test_every_group_has_trajectory_details(seen: dict[str, Any]) -> None:
    headings = headings_of(seen["by_iteration"]["0"]["logtrees"]["train"]["root"])
    assert headings.count("Trajectory Details") == GROUPS


def assert_is_node(node: dict[str, Any]) -> None:
    """The shape that tinker's consumers walk: tag, attrs of strings, children that are strings or nodes."""
    assert isinstance(node["tag"], str)
    assert all(isinstance(key, str) and isinstance(value, str) for key, value in node["attrs"].items())
    for child in node["children"]:
        if not isinstance(child, str):
            assert_is_node(child)


def find_conversations(node: dict[str, Any]) -> list[dict[str, Any]]:
    own = [node["data"]] if node.get("data", {}).get("type") == "conversation" else []
    return own + [
        c for child in node["children"] if isinstance(child, dict) for c in find_conversations(child)
    ]


def headings_of(node: dict[str, Any]) -> list[str]:
    own = (
        [html.unescape("".join(node["children"]))]
        if node["tag"] in {"h1", "h2", "h3", "h4", "h5", "h6"}
        else []
    )
    return own + [h for child in node["children"] if isinstance(child, dict) for h in headings_of(child)]


def bare(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in message.items() if key != "step_idx"} for message in messages]


def test_a_running_run_is_read_while_it_is_written(tmp_path: Path) -> None:
    log_path = tmp_path / "runs" / "live"
    with rollbook.Run(log_path, config=CONFIG, layout="nested", total_iterations=ITERATIONS) as run:
        record_iteration(run, 0)
        seen = read_with_tinker(log_path)
        assert [row["step"] for row in seen["metrics"]] == [0]
        assert seen["runs"][0]["status"] == "running"
        record_iteration(run, 1)
    assert [row["step"] for row in read_with_tinker(log_path)["metrics"]] == [0, 1]


def test_failures_are_records_too(tmp_path: Path) -> None:
    log_path = tmp_path / "runs" / "failing"
    with rollbook.Run(log_path, config=CONFIG, layout="nested") as run, run.rollouts(iteration=0) as rollouts:
        with rollouts.group(group_idx=0, size=2) as group:
            group.add(trajectory_of(0, 0))
            group.fail(TimeoutError("the sandbox went away"))
        with rollouts.group(group_idx=1, size=1) as group:
            group.add(trajectory_of(1, 0))
    seen = read_with_tinker(log_path)
    assert seen["warnings"] == []
    records = seen["by_iteration"]["0"]["rollouts"]["train"]
    assert [(r["group_idx"], r["traj_idx"], r["status"]) for r in records] == [
        (0, 0, "ok"),
        (0, 1, "error"),
        (1, 0, "ok"),
    ]
    assert records[1]["total_reward"] is None
    assert "the sandbox went away" in records[1]["error"]


def test_a_resumed_run_reads_as_one(tmp_path: Path) -> None:
    """Tinker's own loop leaves the steps after the last checkpoint twice; ours leaves each once."""
    log_path = tmp_path / "runs" / "resumed"
    with pytest.raises(ZeroDivisionError), rollbook.Run(log_path, config=CONFIG, layout="nested") as run:
        record_iteration(run, 0)
        record_rollouts(run, 1, "train", GROUPS)
        run.log_metrics(METRICS, step=1)
        raise ZeroDivisionError
    with rollbook.Run(log_path, config=CONFIG, layout="nested", resume=True) as run:
        assert run.next_iteration == 1
        for iteration in range(run.next_iteration, ITERATIONS):
            record_iteration(run, iteration)
    seen = read_with_tinker(log_path)
    assert seen["warnings"] == []
    assert [row["step"] for row in seen["metrics"]] == [0, 1, 2]
    assert [info["iteration"] for info in seen["iterations"]] == [0, 1, 2]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Any]]:
    """A run of `rollbook rl`, and what tinker's stores see of it."""
    directory = tmp_path_factory.mktemp("trained")
    setup = write_setup(directory / "setup")
    config = config_of(setup, directory / "runs" / "arithmetic", iterations=5, layout="nested")
    result = rollbook.rl(config, log=lambda _: None)
    return result, read_with_tinker(result.log_path)


def test_a_training_run_is_read_whole(trained: tuple[Any, dict[str, Any]]) -> None:
    result, seen = trained
    assert seen["warnings"] == []
    [run] = seen["runs"]
    assert (
        run["run_id"] == "arithmetic" and run["iteration_count"] == 6
    )  # the last is of the evaluation alone
    assert run["has_config"] and run["has_metrics"] and run["has_checkpoints"]
    assert [info["iteration"] for info in seen["iterations"] if info["has_train_rollouts"]] == [0, 1, 2, 3, 4]
    assert [info["iteration"] for info in seen["iterations"] if info["eval_labels"]] == [0, 2, 4, 5]
    assert (seen["config"]["loss"], seen["config"]["group_size"]) == ({"name": "importance_sampling"}, 4)
    last = seen["last_checkpoint"]
    assert (last["name"], last["batch"], last["final"]) == ("000005", 5, True)
    assert result.log_path / last["state_path"] == result.checkpoint


def test_a_training_runs_rollouts_and_metrics_say_the_same(trained: tuple[Any, dict[str, Any]]) -> None:
    result, seen = trained
    rows = {row["step"]: row for row in seen["metrics"]}
    assert rows[4]["env/all/reward/total"] == result.reward
    assert rows[5]["test/env/all/reward/total"] == result.evals["test"]
    assert {"entropy", "kl_sample_train_v1", "kl_sample_train_v2", "optim/lr"} <= set(seen["metric_keys"])
    for iteration in range(5):
        records = seen["by_iteration"][str(iteration)]["rollouts"]["train"]
        places = [(record["group_idx"], record["traj_idx"]) for record in records]
        assert places == [(group, index) for group in range(4) for index in range(4)]
        rewards = [record["total_reward"] for record in records]
        assert set(rewards) <= {0.0, 1.0}
        assert rows[iteration]["env/all/reward/total"] == pytest.approx(sum(rewards) / 16)
        assert {record["sampling_client_step"] for record in records} == {iteration}
        lengths = [step["ac_len"] for record in records for step in record["steps"]]
        assert rows[iteration]["ac_tokens_per_turn"] == pytest.approx(sum(lengths) / len(lengths))
        [conversation, *_] = find_conversations(
            seen["by_iteration"][str(iteration)]["logtrees"]["train"]["root"]
        )
        assert [message["role"] for message in conversation["messages"]] == ["user", "assistant"]
