"""What ends replies and episodes, by the names of the settings, and what to raise where that is too early."""

from __future__ import annotations

from typing import NamedTuple, Self

from rollbook.rl.settings import SamplerSettings


class Limits(NamedTuple):
    """In tokens."""

    max_tokens: int
    max_length: int
    max_episode_tokens: int | None = None
    of_model: int | None = None

    @classmethod
    def of(cls, sampler: SamplerSettings, of_model: int | None) -> Self:
        """`sampler` has a max_length: it was decided. `of_model` is None where its config says nothing."""
        return cls(sampler.max_tokens, sampler.max_length or 0, sampler.max_episode_tokens, of_model)

    @property
    def for_longer_replies(self) -> str:
        return f"raise sampler.max_tokens ({self.max_tokens}), or set truncated: mask"

    @property
    def for_longer_episodes(self) -> str:
        """The limit that is reached first is the one to raise, if the model allows it."""
        most = self.max_episode_tokens
        if most is not None and most <= self.max_length:
            return f"raise sampler.max_episode_tokens ({most}), or set truncated: mask"
        if self.of_model is not None and self.max_length >= self.of_model:
            return (
                f"sampler.max_length is {self.max_length}, all that the model takes: lower "
                f"sampler.max_tokens ({self.max_tokens}) or environments.max_turns, or set truncated: mask"
            )
        return f"raise sampler.max_length ({self.max_length}), or set truncated: mask"
