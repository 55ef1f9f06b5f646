"""How many requests and tokens a minute rollouts may use.

Both are buckets that fill steadily. A rollout pays when it starts what rollouts used on average, since what
it will use is unknown, and the difference when it ends; so its later turns never wait. Until the first one
has ended, a limit of tokens lets one at a time go: a hundred of unknown size would spend many minutes' tokens
at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from rollbook.records.turns import Usage
from rollbook.rollouts.types import Episode

_BURST_SECONDS = 1.0
_NO_TIME = 1e-6  # what rounding leaves of a wait that is over
_CHARACTERS_A_TOKEN = 4
_LEAST_WEIGHT = 0.1  # of the newest rollout in the average


class Bucket:
    """So many units a minute, with at most a second's worth at once; may go into debt."""

    def __init__(self, per_minute: float) -> None:
        self._rate = per_minute / 60
        self._capacity = max(1.0, self._rate * _BURST_SECONDS)
        self._level = self._capacity
        self._at = time.monotonic()

    def wait(self, amount: float) -> float:
        """Seconds until the amount may be taken; what is more than a second's worth waits for that much."""
        now = time.monotonic()
        self._level = min(self._capacity, self._level + (now - self._at) * self._rate)
        self._at = now
        seconds = (min(amount, self._capacity) - self._level) / self._rate
        return seconds if seconds > _NO_TIME else 0.0

    def take(self, amount: float) -> None:
        self._level -= amount


class Spent(NamedTuple):
    """What a rollout used."""

    requests: float = 1.0
    tokens: float = 0.0


class Budget:
    """Requests and tokens a minute. `spent_on` tells what a result of `run_all` used."""

    def __init__(
        self,
        requests_per_minute: float | None,
        tokens_per_minute: float | None,
        spent_on: Callable[[Any], Spent],
    ) -> None:
        self._requests = Bucket(requests_per_minute) if requests_per_minute else None
        self._tokens = Bucket(tokens_per_minute) if tokens_per_minute else None
        self._spent_on = spent_on
        self._usual = Spent()
        self._ended = self._in_flight = 0

    def wait(self) -> float | None:
        """Seconds until another rollout may start; None: not before one that is in flight has ended."""
        if self._tokens is not None and self._ended == 0 and self._in_flight > 0:
            return None
        pairs = zip((self._requests, self._tokens), self._usual, strict=True)
        return max((bucket.wait(amount) for bucket, amount in pairs if bucket is not None), default=0.0)

    def start(self) -> Spent:
        """Pay for one that starts; returns what it was charged."""
        self._in_flight += 1
        self._pay(self._usual)
        return self._usual

    def end(self, charged: Spent, result: Any = None, failed: Episode | None = None) -> None:
        """Settle the account of one that has ended, with a result or as far as it came."""
        self._in_flight -= 1
        spent = Spent()
        if result is not None:
            spent = self._spent_on(result)
            self._ended += 1
            weight = max(_LEAST_WEIGHT, 1 / self._ended)
            pairs = zip(self._usual, spent, strict=True)
            self._usual = Spent(*(usual + (now - usual) * weight for usual, now in pairs))
        elif failed is not None:
            spent = spent_on_episode(failed)
        self._pay(Spent(spent.requests - charged.requests, spent.tokens - charged.tokens))

    def _pay(self, spent: Spent) -> None:
        for bucket, amount in zip((self._requests, self._tokens), spent, strict=True):
            if bucket is not None:
                bucket.take(amount)


def spent_on_episode(episode: Episode) -> Spent:
    """One request a turn, and the tokens; where nobody counted them, by the length of what was said."""
    requests = max(1.0, len(episode.turns))
    if (usage := episode.usage) is not None:
        return Spent(requests, float(usage.input_tokens + usage.output_tokens))
    tokens, so_far = 0.0, _length(episode.prompt)
    for turn in episode.turns:
        counted = turn.usage or Usage()
        sampled = turn.token_ids or turn.logprobs
        output_tokens = len(sampled) if sampled else _length(turn.messages[:1])
        tokens += counted.input_tokens + counted.output_tokens or so_far + output_tokens
        so_far += _length(turn.messages)
    return Spent(requests, tokens)


def _length(messages: list[dict[str, Any]]) -> float:
    """Tokens, roughly."""
    written = ("content", "reasoning_content", "tool_calls")
    texts = (str(message.get(name) or "") for message in messages for name in written)
    return sum(map(len, texts)) / _CHARACTERS_A_TOKEN
