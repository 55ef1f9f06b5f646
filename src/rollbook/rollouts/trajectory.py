"""The one conversion of a played episode into what is recorded of it."""

from __future__ import annotations

from rollbook.records.rollouts import Trajectory
from rollbook.rollouts.types import Episode


def trajectory_of(episode: Episode) -> Trajectory:
    """The same turns, as the record takes them; nothing is copied and nothing is left out."""
    return Trajectory(
        prompt=episode.prompt,
        turns=episode.turns,
        tools=episode.tools,
        final_reward=episode.final_reward,
        metrics=episode.metrics,
        stop_reason=episode.stop_reason,
    )
