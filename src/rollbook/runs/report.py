"""How an iteration's rollouts look in the logtree: groups, conversations, rewards, Trajectory Details.

Sections are made one at a time from the lines just written, so memory does not grow with the iteration.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from rollbook.records import logtree
from rollbook.records.numbers import mean_text
from rollbook.records.rollout_stats import ExactMean
from rollbook.runs.rollout_files import Place, RolloutReader

_Row = dict[str, Any]
_Line = Mapping[str, Any]


class Notes:
    """What a loop logs in its groups, put aside in a file without a name until it is known which to show."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._guard = threading.Lock()
        self._places: dict[int, tuple[int, int]] = {}
        self._file: IO[bytes] | None = None

    def keep(self, group_idx: int, node: logtree.Node) -> None:
        if len(node.children) <= 1:  # the heading
            return
        data = logtree.encode_node(node)
        with self._guard:
            if self._file is None:
                self._file = TemporaryFile(dir=self._directory)  # noqa: SIM115 - closed in `close`
            self._places[group_idx] = (self._file.seek(0, os.SEEK_END), len(data))
            self._file.write(data)

    def add_to(self, node: logtree.Node, group_idx: int) -> None:
        with self._guard:
            if self._file is None or group_idx not in self._places:
                return
            start, length = self._places[group_idx]
            self._file.seek(start)
            kept = logtree.decode_node(self._file.read(length))
        node.attrs.update(kept.attrs)
        node.children += kept.children[1:]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def group_sections(
    reader: RolloutReader, begun: Iterable[int], count: int, notes: Notes
) -> Iterator[logtree.Node]:
    """A section for each group that was begun, in order; `count` of them show their conversations."""
    means = [
        (group_idx, rewards.mean if rewards.count else None)
        for group_idx, places in _groups(reader, begun)
        for rewards in [_rewards(summaries(reader, places))]
    ]
    chosen = spread_over_rewards(means, count)
    for group_idx, places in _groups(reader, begun):
        rows = list(summaries(reader, places))
        ids = {"group_idx": group_idx, "task_id": _task_id(rows), **_tags(rows)}
        node = logtree.section(_title(group_idx, rows), **ids)
        if group_idx in chosen:
            notes.add_to(node, group_idx)
            for place, summary in zip(places, rows, strict=True):
                _add_trajectory(node, summary, reader.transcript(place))
        _add_details(node, rows)
        yield node


def _groups(reader: RolloutReader, begun: Iterable[int]) -> Iterator[tuple[int, list[Place]]]:
    recorded = reader.groups()
    following = next(recorded, None)
    for group_idx in sorted(begun):
        if following is not None and following[0] == group_idx:
            yield following
            following = next(recorded, None)
        else:
            yield group_idx, []


def summaries(reader: RolloutReader, places: Iterable[Place]) -> Iterator[_Line]:
    return map(reader.summary, places)


def _rewards(lines: Iterable[_Line]) -> ExactMean:
    """Those of the trajectories that ended well."""
    rewards = ExactMean()
    for line in lines:
        reward = line["total_reward"] if line["status"] == "ok" else None
        if reward is not None and math.isfinite(reward):
            rewards.add(reward)
    return rewards


def spread_over_rewards(means: Iterable[tuple[int, float | None]], count: int) -> set[int]:
    """The groups to show in full: evenly spaced in the order of mean reward, the worst and best among them.

    Groups without any reward sort lowest: a group that only failed is the one a person must see.
    """
    ranked = [group for _, _, group in sorted((mean is not None, mean or 0.0, at) for at, mean in means)]
    if count >= len(ranked):
        return set(ranked)
    if count == 1:
        return {ranked[len(ranked) // 2]}
    last = len(ranked) - 1
    return {ranked[round(place * last / (count - 1))] for place in range(count)}


def _title(group_idx: int, rows: list[_Line]) -> str:
    failed = sum(row["status"] != "ok" for row in rows)
    rewards = _rewards(rows)
    mean = mean_text(rewards.mean, rewards.std_error, ".3g")
    parts = [f"Group {group_idx}", f"mean reward {mean}" if rewards.count else "no reward"]
    if failed:
        parts.append(f"{failed} failed")
    if task_id := _task_id(rows):
        parts.append(task_id)
    return " · ".join(parts)


def _task_id(rows: list[_Line]) -> str | None:
    return next((row["task_id"] for row in rows if row.get("task_id") is not None), None)


def _tags(rows: list[_Line]) -> dict[str, str]:
    """The environment of a group, where it has a name."""
    tags = next((row["tags"] for row in rows if row.get("tags")), None)
    return {} if tags is None else {"tags": ", ".join(tags)}


def _add_trajectory(node: logtree.Node, summary: _Line, transcript: _Line) -> None:
    """The conversation of one trajectory, and what it earned for what."""
    reward = f"reward {_short(summary['total_reward'])}" if summary["status"] == "ok" else "failed"
    ids = {"group_idx": summary["group_idx"], "traj_idx": summary["traj_idx"]}
    with logtree.under(node), logtree.scope(f"Trajectory {summary['traj_idx']} · {reward}", **ids):
        if error := summary.get("error"):
            logtree.text(f"failed: {error}")
        if messages := transcript.get("messages"):
            logtree.conversation(messages, **ids)
        if rows := _reward_rows(summary):
            logtree.table(rows, caption="Reward and grading")


def _reward_rows(summary: _Line) -> list[_Row]:
    """What each turn earned, with what the environment measured and noted; then what the episode did."""
    rows = [
        _row({"turn": step["step_idx"], "reward": step["reward"]}, step["metrics"], step["logs"])
        for step in summary["steps"]
    ]
    whole = _row({"turn": "episode", "reward": summary["final_reward"]}, summary["trajectory_metrics"], {})
    if summary["final_reward"] or summary["trajectory_metrics"]:
        rows.append(whole)
    if len(rows) > 1:
        rows.append({"turn": "total", "reward": summary["total_reward"]})
    return rows


def _add_details(node: logtree.Node, lines: list[_Line]) -> None:
    any_failed = any("error" in line for line in lines)
    trajectories = [
        _row(
            {
                "traj_idx": line["traj_idx"],
                "status": line["status"],
                **({"error": line.get("error")} if any_failed else {}),  # the last column is out of sight
                "total_reward": line["total_reward"],
                "final_reward": line["final_reward"],
                "turns": len(line["steps"]),
                "ac_tokens": _sum_of_known(step["ac_len"] for step in line["steps"]),
                "final_ob_len": line.get("final_ob_len"),
                "stop_reason": line.get("stop_reason"),
            },
            line["trajectory_metrics"],
            {},
        )
        for line in lines
    ]
    turns = [
        _row(
            {
                "traj_idx": line["traj_idx"],
                "turn": step["step_idx"],
                "ob_len": step["ob_len"],
                "ac_len": step["ac_len"],
                "step_reward": step["reward"],
            },
            step["metrics"],
            {},
        )
        for line in lines
        for step in line["steps"]
    ]
    with logtree.under(node), logtree.scope("Trajectory Details"):
        logtree.table(trajectories, caption="Trajectories")
        if turns:
            logtree.table(turns, caption="Turns")


def _row(own: _Row, metrics: _Line, logs: _Line) -> _Row:
    """One row; a metric with the name of a column of ours gets another name."""
    row = dict(own)
    for name, value in [*metrics.items(), *logs.items()]:
        while name in row:
            name = f"{name}_"
        row[name] = value
    return row


def _sum_of_known(lengths: Iterable[int | None]) -> int | None:
    known = list(lengths)
    return None if None in known else sum(length or 0 for length in known)


def _short(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g}"
