"""Rollbook's side, through its public API, as a training loop would use it.

`iteration` records finished episodes with `run.rollouts`, every group with its content: summaries, the full
transcripts, the logtree and the page. `Trajectory` and `Step` objects are made inside the clock, because a
loop makes them only for Rollbook. `tree_calls` and `tree_text` make, with Rollbook's logtree, the calls
that the tinker side's cases of the same name make with theirs.

Durability: a line is one write(2), so it is never torn and survives a kill; metrics reach the disk within
a second by a group commit, summaries and transcripts when the iteration ends; all files are fsynced before
the clock stops. Pages and trees are written aside, fsynced and renamed.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from workload import (
    Episode,
    Watch,
    metric_rows,
    scaled,
    side_main,
    summary_episodes,
    text_episodes,
    total_size,
)

import rollbook
from rollbook import Step, Trajectory, logtree


def metrics(directory: Path, scale: float) -> dict[str, float]:
    rows, count = metric_rows(64, 100), scaled(5000, scale)
    run = rollbook.Run(directory / "run", layout="nested")
    with Watch() as watch:
        calls = []
        for step in range(count):
            start = time.perf_counter()
            run.log_metrics(rows[step % 64], step)
            calls.append(time.perf_counter() - start)
        run.sync()
    run.close()
    with Watch() as reading:
        read = list(rollbook.open_run(directory / "run").metrics)
    assert len(read) == count
    return {
        "call_us": statistics.median(calls) * 1e6,
        "rows_per_s": count / watch.seconds,
        "row_bytes": total_size(directory / "run" / "metrics.jsonl") / count,
        "read_rows_per_s": count / reading.seconds,
    }


def to_trajectory(episode: Episode, messages: list[dict[str, str]]) -> Trajectory:
    steps = [
        Step(ob_len=turn.ob_len, ac_len=turn.ac_len, reward=turn.reward, metrics=turn.metrics, logs=turn.logs)
        for turn in episode.turns
    ]
    return Trajectory(steps=steps, messages=messages, stop_reason="stop")


def record(
    run: rollbook.Run, groups: list[list[Episode]], conversations: list[list[list[dict[str, str]]]]
) -> None:
    with run.rollouts(iteration=0) as rollouts:
        for episodes, messages in zip(groups, conversations, strict=True):
            first = episodes[0]
            with rollouts.group(
                first.group, task_id=first.task_id, tags=["math"], sampling_client_step=0, size=len(episodes)
            ) as group:
                for episode, conversation in zip(episodes, messages, strict=True):
                    group.add(to_trajectory(episode, conversation))


def summaries(directory: Path, scale: float) -> dict[str, float]:
    groups = summary_episodes(scaled(64, scale), 16, 10)
    folder = directory / "run" / "iteration_000000"
    with rollbook.Run(directory / "run", layout="nested", num_groups_to_log=0) as run, Watch() as watch:
        record(run, groups, [[[] for _ in group] for group in groups])
    with Watch() as reading:
        read = list(rollbook.open_run(directory / "run").rollouts())
    assert len(read) == len(groups) * 16
    return {
        "seconds": watch.seconds,
        "bytes": total_size(folder / "train_rollout_summaries.jsonl"),
        "read_seconds": reading.seconds,
    }


def iteration(directory: Path, scale: float) -> dict[str, float]:
    groups = text_episodes(scaled(64, scale), 16, 10)
    conversations = [[episode.messages() for episode in group] for group in groups]
    shown = len(groups)
    with rollbook.Run(directory / "run", layout="nested", num_groups_to_log=shown) as run, Watch() as watch:
        record(run, groups, conversations)
    return tree_numbers(directory / "run" / "iteration_000000", watch, len(groups))


def tree_calls(directory: Path, scale: float) -> dict[str, float]:
    groups = text_episodes(scaled(64, scale), 16, 10)
    conversations = [[episode.messages() for episode in group] for group in groups]
    run = rollbook.Run(directory / "run", layout="nested")
    with run, Watch() as watch, run.report(iteration=0, title="RL Iteration 0"):
        for episodes, messages in zip(groups, conversations, strict=True):
            with logtree.scope("Group Rollout"):
                for episode, conversation in zip(episodes, messages, strict=True):
                    log_turns(episode, conversation)
                with logtree.scope("Trajectory Details"):
                    for episode in episodes:
                        log_details(episode)
    return tree_numbers(directory / "run" / "iteration_000000", watch, len(groups))


def log_turns(episode: Episode, conversation: list[dict[str, str]]) -> None:
    for number, turn in enumerate(episode.turns):
        with logtree.scope("Prompt"):
            logtree.conversation(conversation[2 * number : 2 * number + 1])
        with logtree.scope("Policy Response"):
            logtree.conversation(conversation[2 * number + 1 : 2 * number + 2])
        with logtree.scope("Reward"):
            reward = {
                "reference_answer": "42",
                "format_valid": True,
                "correct": turn.reward > 0,
                "format_coef": 0.1,
                "reward": turn.reward,
            }
            logtree.table(reward, "Reward components", columns=("key", "value"))


def log_details(episode: Episode) -> None:
    """The same sections and tables as tinker-cookbook's `Trajectory Details`."""
    with logtree.scope(f"Trajectory {episode.index} Episode"), logtree.scope("Episode Details"):
        for number, turn in enumerate(episode.turns, start=1):
            with logtree.scope(f"Turn {number}"):
                stats = {"ob_len": turn.ob_len, "ac_len": turn.ac_len, "step_reward": turn.reward}
                logtree.table(stats, "Step stats", columns=("key", "value"))
                with logtree.scope("Step Metrics"):
                    logtree.table(turn.metrics, "Metrics emitted by env.step", columns=("key", "value"))
        reward = sum(turn.reward for turn in episode.turns)
        totals = {
            "num_turns": len(episode.turns),
            "final_ob_len": 0,
            "sum_step_rewards": reward,
            "final_group_reward": 0.0,
            "total_return": reward,
        }
        logtree.table(totals, "Episode totals", columns=("key", "value"))


def tree_text(directory: Path, scale: float) -> dict[str, float]:
    groups = text_episodes(scaled(64, scale), 16, 10)
    conversations = [[episode.messages() for episode in group] for group in groups]
    run = rollbook.Run(directory / "run", layout="nested")
    with run, Watch() as watch, run.report(iteration=0, title="RL Iteration 0"):
        for messages in conversations:
            with logtree.scope("Group Rollout"):
                for conversation in messages:
                    for start in range(0, len(conversation), 2):
                        logtree.conversation(conversation[start : start + 2])
    return tree_numbers(directory / "run" / "iteration_000000", watch, 0)


def tree_numbers(folder: Path, watch: Watch, groups: int) -> dict[str, float]:
    tree = folder / "train_logtree.json"
    assert tree.read_bytes().count(b"Trajectory Details") == groups
    return {
        "seconds": watch.seconds,
        "html_bytes": total_size(folder / "train.html"),
        "json_bytes": total_size(tree),
        "peak_growth": watch.peak_growth,
    }


if __name__ == "__main__":
    side_main(
        {
            "metrics": metrics,
            "summaries": summaries,
            "iteration": iteration,
            "tree_calls": tree_calls,
            "tree_text": tree_text,
        },
        version=rollbook.__version__,
    )
