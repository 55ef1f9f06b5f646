"""An episode as the record takes it: the same turns, their messages and their tokens, not a copy."""

from __future__ import annotations

from typing import Any

from rollbook.records.rollouts import Trajectory
from rollbook.rollouts.types import Episode


def trajectory_of(episode: Episode, *, metrics: dict[str, Any] | None = None) -> Trajectory:
    """`metrics` of the job's own (an advantage) join those of the episode."""
    return Trajectory(
        prompt=episode.prompt,
        turns=episode.turns,
        tools=episode.tools,
        final_reward=episode.final_reward,
        metrics={**episode.metrics, **(metrics or {})},
        stop_reason=episode.stop_reason,
    )
