"""*_transcripts.jsonl: the full conversation of every trajectory, one line each.

The ids are those of the summary line. Each assistant message carries `step_idx`, the index of the step in
the summary that it belongs to, so a turn's text joins with its numbers.
"""

from __future__ import annotations

from typing import Any, ClassVar

from rollbook.records.record import Record
from rollbook.records.rollouts import RolloutSummary, Status, Trajectory


class Transcript(Record, kw_only=True):
    REQUIRED: ClassVar[frozenset[str]] = frozenset({"total_reward", "task_id"})

    run_id: str | None = None
    split: str
    iteration: int
    group_idx: int
    traj_idx: int
    task_id: str | None = None
    status: Status = Status.OK
    total_reward: float | None = None
    stop_reason: str | None = None
    error: str | None = None
    messages: list[dict[str, Any]] = []


def transcribe(trajectory: Trajectory | None, summary: RolloutSummary) -> Transcript:
    return Transcript(
        run_id=summary.run_id,
        split=summary.split,
        iteration=summary.iteration,
        group_idx=summary.group_idx,
        traj_idx=summary.traj_idx,
        task_id=summary.task_id,
        status=summary.status,
        total_reward=summary.total_reward,
        stop_reason=summary.stop_reason,
        error=summary.error,
        messages=_with_step_indices(trajectory) if trajectory else [],
    )


def _with_step_indices(trajectory: Trajectory) -> list[dict[str, Any]]:
    messages = []
    step_idx = 0
    for message in trajectory.messages:
        plain = dict(message)
        if plain.get("role") == "assistant":
            plain.setdefault("step_idx", step_idx)
            step_idx += 1
        messages.append(plain)
    return messages
