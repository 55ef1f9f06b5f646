"""How a reply is sampled: what the policy is set to, and what a request asks for instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from rollbook.policies.conversion import extra_body
from rollbook.rollouts.types import FailureKind, RolloutFailure

# The names of Responses and of chat completions; a request may use either.
_NAMES = {"max_output_tokens": "max_tokens", "max_completion_tokens": "max_tokens"}
# Parameters that say nothing about sampling, or that mean what happens anyway.
_NO_SAMPLING = {"model", "metadata", "user", "store", "stream", "parallel_tool_calls", "seed", "n", "text"}
_MEANS_NOTHING = {"tool_choice": "auto", "truncation": "disabled", "n": 1, "min_p": 0}


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`max_tokens` limits the reply of a turn, `max_episode_tokens` prompt and replies of all turns together.
    Temperature 0 takes the most likely token."""

    max_tokens: int
    max_episode_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    stop: tuple[str, ...] = ()  # strings that end a reply, besides the stop tokens

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_episode_tokens"):
            if (number := getattr(self, name)) is not None and number < 1:
                raise ValueError(f"{name} must be at least 1, not {number}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 or more, not {self.temperature:g}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p:g}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (all tokens) or more, not {self.top_k}")
        if not all(self.stop):
            raise ValueError("a stop string must not be empty")

    def check_training(self) -> None:
        """The trainer takes log-probabilities of the whole distribution at the sampling temperature."""
        if self.top_p < 1 or self.top_k:
            raise ValueError(
                "top_p and top_k cannot be used in training: the trainer's log-probabilities are those of "
                "the whole distribution, and the tokens would not be samples of it. Evals and collect can"
            )
        if self.temperature == 0:
            raise ValueError("temperature 0 cannot be used in training: every sample would be the same")

    def asked(self, params: Mapping[str, Any]) -> Sampling:
        """With the parameters of a request, whose own win. Unknown ones fail the request."""
        changes: dict[str, Any] = {}
        for key, value in plain_params(params).items():
            name = _NAMES.get(key, key)
            if value is None or name in _NO_SAMPLING or _MEANS_NOTHING.get(name, ...) == value:
                continue
            if name not in self.__struct_fields__:
                known = ", ".join(self.__struct_fields__)
                raise invalid(f"the local sampler does not know the parameter {key!r}; it knows {known}")
            changes[name] = (value,) if name == "stop" and isinstance(value, str) else value
        if not changes:
            return self
        try:
            return msgspec.convert({**msgspec.structs.asdict(self), **changes}, Sampling)
        except msgspec.ValidationError as error:
            raise invalid(f"sampling parameters: {error}") from None


def plain_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters with those for an engine, which come as text in `metadata.extra_body`."""
    try:
        return {**params, **extra_body(params)}
    except ValueError as error:
        raise invalid(str(error)) from None


def invalid(why: str) -> RolloutFailure:
    return RolloutFailure(FailureKind.INVALID_REQUEST, why)
