"""When a failed rollout is tried again, and when it is given up.

Exponential back-off with full jitter, so that a thousand requests refused together do not come back
together; a server's Retry-After is the least that is waited, and does not shorten the back-off. Each kind of
failure has a budget of attempts of its own: a rate limit is patience, an invalid request will not get better.
"""

from __future__ import annotations

import math
import random

import msgspec

from rollbook.records.plain import utc_now
from rollbook.records.turns import Usage
from rollbook.rollouts.types import FailureKind, RolloutFailure
from rollbook.rollouts.usage import clamp_tokens, known_usage

_MOST_DOUBLINGS = 64  # more than any wait has room for


class RetrySettings(msgspec.Struct, kw_only=True):
    """Attempts a rollout gets for each kind of failure, the first one included."""

    connect: int = 12
    transport: int = 6
    timeout: int = 3
    rate_limit: int = 30
    server_error: int = 8
    invalid_request: int = 1
    bad_answer: int = 3
    environment: int = 1
    judge: int = 6
    worker_lost: int = 3  # a rollout that takes this many processes down with it is given up
    first_wait_s: float = 0.5
    longest_wait_s: float = 60.0
    longest_retry_after_s: float = 3600.0  # a server may ask for more than anybody has time for

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            least = 0 if name.endswith("_s") else 1
            if not least <= value < math.inf:
                raise ValueError(f"retry.{name} must be at least {least}, not {value}")


class Attempts:
    """The failures of one rollout so far."""

    __slots__ = ("failures",)

    def __init__(self) -> None:
        self.failures: list[dict[str, object]] = []

    def note(self, failure: RolloutFailure, seconds: float) -> None:
        """Note a failure, with the tokens of its turns, which are paid for."""
        episode = failure.episode
        usage = Usage() if episode is None else episode.counted or known_usage(episode.turns)
        self.failures.append(
            {
                "kind": str(failure.kind),
                "message": str(failure),
                "status": failure.status,
                "input_tokens": clamp_tokens(usage.input_tokens),
                "output_tokens": clamp_tokens(usage.output_tokens),
                "seconds": round(seconds, 3),
                "at": utc_now(),
            }
        )

    def may_retry(self, kind: FailureKind, settings: RetrySettings) -> bool:
        same = sum(failure["kind"] == kind for failure in self.failures)
        budget: int = getattr(settings, kind)
        return same < budget

    def may_be_the_culprit(self, settings: RetrySettings) -> bool:
        """Lost with other rollouts, and one loss from being given up: the next attempt must be its own."""
        lost = sum(failure["kind"] == FailureKind.WORKER_LOST for failure in self.failures)
        return 0 < lost >= settings.worker_lost - 1

    def wait(self, retry_after: float | None, settings: RetrySettings, chance: random.Random) -> float:
        """Seconds until the next attempt."""
        doublings = min(len(self.failures) - 1, _MOST_DOUBLINGS)
        ceiling = min(settings.longest_wait_s, settings.first_wait_s * 2.0**doublings)
        usual = chance.uniform(0, ceiling)
        if retry_after is None or math.isnan(retry_after):
            return usual
        least = min(retry_after, settings.longest_retry_after_s)
        return max(usual, least + chance.uniform(0, min(ceiling, 0.1 * least + 0.05)))
