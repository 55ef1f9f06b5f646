"""tinker-cookbook's side, run by `.venvs/tinker/bin/python`: the unmodified package, driven as its loop does.

Trajectories are finished before the clock starts and handed to the package's own `do_group_rollout` by a
rollout strategy, so that its scopes, its `Trajectory Details` and its tables are made by its own code; then
`init_trace` writes the HTML and `TrainingRunStore` the JSON. Per turn an env logs one of:

`tool_env`      what the shipped multi-turn tool env does (`AgentToolMessageEnv.step`): the answer, the tool
                call and the tool's result go into the step's `logs`, which become `Diagnostics` entries of
                the tree and `logs` of the summaries; there is no conversation.
`chat_new`      `ProblemEnv.step`'s Prompt, Policy Response and Reward sections, where Prompt holds only the
                messages that are new in this turn. `ProblemEnv` itself has one turn; no shipped env logs a
                conversation in more than one.
`chat_whole`    the same, where Prompt holds what the policy saw, as `ProblemEnv` logs it: the conversation
                so far.

`tree_calls` is `chat_new` without the summaries; `tree_text` logs the conversations and nothing else.

Durability: each append opens, writes and closes the file; no fsync, no lock, no rename.
"""

from __future__ import annotations

import asyncio
import importlib.util
import statistics
import sys
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workload import (
    Episode,
    Turn,
    Watch,
    metric_rows,
    scaled,
    side_main,
    summary_episodes,
    text_episodes,
    total_size,
)

if importlib.util.find_spec("torch") is None:
    # The package imports torch for annotations; nothing that runs here calls it.
    stand_in = types.ModuleType("torch")
    vars(stand_in)["Tensor"] = type("Tensor", (), {})
    sys.modules["torch"] = stand_in

import tinker
from tinker_cookbook import __version__
from tinker_cookbook.completers import TokenCompleter, TokensWithLogprobs
from tinker_cookbook.rl.rollout_logging import serialize_rollout_summaries
from tinker_cookbook.rl.rollout_strategy import RolloutResult, RolloutStrategy
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, Trajectory, TrajectoryGroup, Transition
from tinker_cookbook.stores import LocalStorage, TrainingRunStore
from tinker_cookbook.utils import logtree
from tinker_cookbook.utils.logtree_formatters import ConversationFormatter

LogTurn = Callable[[Episode, list[dict[str, str]], int], None]


def metrics(directory: Path, scale: float) -> dict[str, float]:
    rows, count = metric_rows(64, 100), scaled(5000, scale)
    store = TrainingRunStore(LocalStorage(directory))
    with Watch() as watch:
        calls = []
        for step in range(count):
            start = time.perf_counter()
            store.write_metrics(rows[step % 64], step)
            calls.append(time.perf_counter() - start)
    with Watch() as reading:
        read = TrainingRunStore(LocalStorage(directory)).read_metrics()
    assert len(read) == count
    return {
        "call_us": statistics.median(calls) * 1e6,
        "rows_per_s": count / watch.seconds,
        "row_bytes": total_size(directory / "metrics.jsonl") / count,
        "read_rows_per_s": count / reading.seconds,
    }


def to_trajectory(episode: Episode, logs_of: Callable[[Episode, int], dict[str, Any]]) -> Trajectory:
    last = len(episode.turns) - 1
    return Trajectory(
        transitions=[
            Transition(
                ob=tinker.ModelInput.from_ints([0] * turn.ob_len),
                ac=TokensWithLogprobs(tokens=[0] * turn.ac_len, maybe_logprobs=None),
                reward=turn.reward,
                episode_done=number == last,
                metrics=turn.metrics,
                logs=logs_of(episode, number),
            )
            for number, turn in enumerate(episode.turns)
        ],
        final_ob=tinker.ModelInput.empty(),
    )


def own_logs(episode: Episode, number: int) -> dict[str, Any]:
    return episode.turns[number].logs


def tool_env_logs(episode: Episode, number: int) -> dict[str, Any]:
    """The keys of `AgentToolMessageEnv.step`; the tool's result is what the next turn observes."""
    turn = episode.turns[number]
    logs: dict[str, Any] = {"assistant_content": turn.action}
    if number + 1 < len(episode.turns):
        logs["tool_call_0"] = 'run({"code": "print(1)"})'
        logs["tool_result_0"] = episode.turns[number + 1].observation
    return logs


def summaries(directory: Path, scale: float) -> dict[str, float]:
    groups = summary_episodes(scaled(64, scale), 16, 10)
    finished = [
        TrajectoryGroup([to_trajectory(e, own_logs) for e in g], [0.0] * 16, [{}] * 16) for g in groups
    ]
    store = TrainingRunStore(LocalStorage(directory))
    with Watch() as watch:
        write_summaries(store, finished)
    path = directory / "iteration_000000" / "train_rollout_summaries.jsonl"
    with Watch() as reading:
        read = TrainingRunStore(LocalStorage(directory)).read_rollouts(0)
    assert len(read) == len(groups) * 16
    return {"seconds": watch.seconds, "bytes": total_size(path), "read_seconds": reading.seconds}


def write_summaries(store: TrainingRunStore, finished: Sequence[TrajectoryGroup]) -> None:
    records = serialize_rollout_summaries(
        split="train",
        iteration=0,
        trajectory_groups_P=finished,
        taglist_P=[["math"]] * len(finished),
        sampling_client_steps_P=[0] * len(finished),
    )
    store.write_rollouts(0, records)


def log_nothing(episode: Episode, conversation: list[dict[str, str]], number: int) -> None:
    """A tool env makes no logtree call of its own."""


def log_new_messages(episode: Episode, conversation: list[dict[str, str]], number: int) -> None:
    log_sections(
        conversation[2 * number : 2 * number + 1], conversation[2 * number + 1], episode.turns[number]
    )


def log_whole_prompt(episode: Episode, conversation: list[dict[str, str]], number: int) -> None:
    log_sections(conversation[: 2 * number + 1], conversation[2 * number + 1], episode.turns[number])


def log_sections(prompt: list[dict[str, str]], response: dict[str, str], turn: Turn) -> None:
    """The log calls of `ProblemEnv.step`."""
    with logtree.scope_header("Prompt"):
        logtree.log_formatter(ConversationFormatter(messages=prompt))
    with logtree.scope_header("Policy Response"):
        logtree.log_formatter(ConversationFormatter(messages=[response]))
    with logtree.scope_header("Reward"):
        logtree.table_from_dict(
            {
                "reference_answer": "42",
                "format_valid": True,
                "correct": turn.reward > 0,
                "format_coef": 0.1,
                "reward": f"{turn.reward:.3f}",
            },
            caption="Reward components",
        )


@dataclass(frozen=True)
class Replay(RolloutStrategy):
    """Hands over finished trajectories, after the log calls an env makes at each step."""

    episodes: list[Episode]
    conversations: list[list[dict[str, str]]]
    trajectories: list[Trajectory]
    log_turn: LogTurn

    async def execute(self, env_group_builder: EnvGroupBuilder, policy: TokenCompleter) -> RolloutResult:
        for episode, conversation in zip(self.episodes, self.conversations, strict=True):
            for number in range(len(episode.turns)):
                self.log_turn(episode, conversation, number)
        return RolloutResult(trajectories=self.trajectories, envs=[], errors=[])


class NoEnvs(EnvGroupBuilder):
    """Group rewards of zero; the strategy needs no envs."""

    async def make_envs(self) -> Sequence[Env]:
        return []


async def log_iteration(directory: Path, groups: list[Replay], with_summaries: bool) -> None:
    """One iteration as `rl/train.py` records it: the scope of `_get_logtree_scope`, then the summaries."""
    store = TrainingRunStore(LocalStorage(directory))
    page = directory / "iteration_000000" / "train.html"
    page.parent.mkdir()
    with logtree.init_trace("RL Iteration 0", path=str(page)) as trace:
        logtree.log_text("Rollouts and rewards of a subset of the groups of this iteration.")
        finished = [await do_group_rollout(NoEnvs(), TokenCompleter(), strategy=group) for group in groups]
    store.write_logtree(0, trace.to_dict())
    if with_summaries:
        write_summaries(store, finished)


def logtree_case(
    log_turn: LogTurn, logs_of: Callable[[Episode, int], dict[str, Any]], with_summaries: bool
) -> Any:
    def case(directory: Path, scale: float) -> dict[str, float]:
        groups = [
            Replay(
                group,
                [episode.messages() for episode in group],
                [to_trajectory(episode, logs_of) for episode in group],
                log_turn,
            )
            for group in text_episodes(scaled(64, scale), 16, 10)
        ]
        with Watch() as watch:
            asyncio.run(log_iteration(directory, groups, with_summaries))
        return tree_numbers(directory / "iteration_000000", watch, len(groups))

    return case


def tree_text(directory: Path, scale: float) -> dict[str, float]:
    """Conversations and nothing else: no Trajectory Details, no reward tables."""
    conversations = [[e.messages() for e in group] for group in text_episodes(scaled(64, scale), 16, 10)]
    store = TrainingRunStore(LocalStorage(directory))
    folder = directory / "iteration_000000"
    folder.mkdir()
    with Watch() as watch:
        with logtree.init_trace("RL Iteration 0", path=str(folder / "train.html")) as trace:
            for messages in conversations:
                with logtree.scope_header("Group Rollout"):
                    for conversation in messages:
                        for start in range(0, len(conversation), 2):
                            turn = conversation[start : start + 2]
                            logtree.log_formatter(ConversationFormatter(messages=turn))
        store.write_logtree(0, trace.to_dict())
    return tree_numbers(folder, watch, 0)


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
            "iteration_tool_env": logtree_case(log_nothing, tool_env_logs, with_summaries=True),
            "iteration_chat_new": logtree_case(log_new_messages, own_logs, with_summaries=True),
            "iteration_chat_whole": logtree_case(log_whole_prompt, own_logs, with_summaries=True),
            "tree_calls": logtree_case(log_new_messages, own_logs, with_summaries=False),
            "tree_text": tree_text,
        },
        version=__version__,
    )
