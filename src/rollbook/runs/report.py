"""How an iteration's rollouts look in the logtree: groups, conversations, Trajectory Details."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rollbook.records import logtree
from rollbook.records.plain import is_finite
from rollbook.records.rollouts import RolloutSummary, Status, Trajectory
from rollbook.records.transcripts import numbered_messages

_ROW = dict[str, Any]


@dataclass
class GroupReport:
    """The numbers of one group that outlive its text."""

    group_idx: int
    trajectories: list[_ROW] = field(default_factory=list)
    turns: list[_ROW] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    def add(self, summary: RolloutSummary) -> None:
        failed = summary.status is Status.ERROR
        self.trajectories.append(
            {
                "traj_idx": summary.traj_idx,
                "status": str(summary.status),
                "total_reward": summary.total_reward,
                "final_reward": summary.final_reward,
                "turns": len(summary.steps),
                "ac_tokens": summary.ac_len,
                "final_ob_len": summary.final_ob_len,
                "stop_reason": summary.stop_reason,
                **({"error": summary.error} if failed else {}),
                **summary.trajectory_metrics,
            }
        )
        for step in summary.steps:
            self.turns.append(
                {
                    "traj_idx": summary.traj_idx,
                    "turn": step.step_idx,
                    "ob_len": step.ob_len,
                    "ac_len": step.ac_len,
                    "step_reward": step.reward,
                    **step.metrics,
                }
            )
        if summary.total_reward is not None and is_finite(summary.total_reward) and not failed:
            self.rewards.append(summary.total_reward)

    @property
    def mean_reward(self) -> float | None:
        return sum(self.rewards) / len(self.rewards) if self.rewards else None

    def title(self, task_id: str | None) -> str:
        failed = sum(row["status"] == Status.ERROR for row in self.trajectories)
        reward = "no reward" if self.mean_reward is None else f"mean reward {self.mean_reward:.3g}"
        parts = [f"Group {self.group_idx}", reward]
        if failed:
            parts.append(f"{failed} failed")
        if task_id:
            parts.append(task_id)
        return " · ".join(parts)


def spread_over_rewards(reports: Iterable[GroupReport], count: int) -> set[int]:
    """The groups to show in full: evenly spaced in the order of mean reward, the worst and best among them.

    Groups without any reward sort lowest: a group that only failed is the one a person must see.
    """
    ranked = sorted(reports, key=lambda report: (report.mean_reward or 0.0, report.group_idx))
    ranked.sort(key=lambda report: report.mean_reward is not None)
    if count >= len(ranked):
        return {report.group_idx for report in ranked}
    if count == 1:
        return {ranked[len(ranked) // 2].group_idx}
    last = len(ranked) - 1
    return {ranked[round(place * last / (count - 1))].group_idx for place in range(count)}


def add_trajectory(node: logtree.Node, summary: RolloutSummary, trajectory: Trajectory | None) -> None:
    """The conversation of one trajectory, with what the environment noted, below its group."""
    reward = "failed" if summary.status is Status.ERROR else f"reward {_short(summary.total_reward)}"
    ids = {"group_idx": summary.group_idx, "traj_idx": summary.traj_idx}
    with logtree.under(node), logtree.scope(f"Trajectory {summary.traj_idx} · {reward}", **ids):
        if summary.error:
            logtree.text(f"failed: {summary.error}")
        if trajectory is not None and (messages := numbered_messages(trajectory)):
            logtree.conversation(messages, **ids)
        notes = [{"turn": step.step_idx, **step.logs} for step in summary.steps if step.logs]
        if notes:
            logtree.table(notes, caption="Diagnostics")


def add_details(
    trace: logtree.Trace, node: logtree.Node, report: GroupReport, *, task_id: str | None, with_content: bool
) -> None:
    """Attach a group to the trace: its content if it was chosen, its Trajectory Details in any case."""
    if not with_content:
        node = logtree.section("", group_idx=report.group_idx)
    node.identify(task_id=task_id)
    node.retitle(report.title(task_id))
    with logtree.under(node), logtree.scope("Trajectory Details"):
        logtree.table(report.trajectories, caption="Trajectories")
        if report.turns:
            logtree.table(report.turns, caption="Turns")
    trace.attach(node)


def _short(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g}"
