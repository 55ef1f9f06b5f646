"""How much may be under way: a number of rollouts that adapts, and budgets a minute.

The number of rollouts in flight grows by one for every round of successes and halves when the server pushes
back, at most once for the requests that were already on their way (TCP's rule, for TCP's reason). Requests
and tokens a minute are buckets that fill steadily; tokens are settled after the fact, because nobody knows
them before: until the first answer the length of the request stands for them, then the usual of late. Where
the server does not count, the length of what was asked and answered does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from rollbook.policies.base import Completion, FailureKind, Message, Policy, Request

_PUSH_BACK = frozenset({FailureKind.RATE_LIMIT, FailureKind.SERVER_ERROR, FailureKind.TIMEOUT})
_BURST_SECONDS = 1.0
_CHARACTERS_A_TOKEN = 4


class Concurrency:
    """The number of rollouts that may be in flight now."""

    def __init__(self, most: int, *, adaptive: bool) -> None:
        self.most = most
        self._adaptive = adaptive
        self._limit = float(most)
        self._lowered_at = -1.0

    @property
    def limit(self) -> int:
        return int(self._limit)

    def succeeded(self) -> None:
        if self._limit < self.most:
            self._limit = min(self.most, self._limit + 1 / self._limit)

    def failed(self, kind: FailureKind, started: float) -> None:
        """`started` is when the failed attempt began, on the monotonic clock."""
        if self._adaptive and kind in _PUSH_BACK and started > self._lowered_at:
            self._limit = max(1.0, self._limit / 2)
            self._lowered_at = time.monotonic()


class Bucket:
    """So many units a minute, with at most a second's worth at once; may go into debt."""

    def __init__(self, per_minute: float) -> None:
        self._rate = per_minute / 60
        self._capacity = max(1.0, self._rate * _BURST_SECONDS)
        self._level = self._capacity
        self._at = time.monotonic()

    def take(self, amount: float) -> float:
        """Take now, and return how long to wait until it was fair to."""
        now = time.monotonic()
        self._level = min(self._capacity, self._level + (now - self._at) * self._rate)
        self._at = now
        self._level -= amount
        return 0.0 if self._level >= 0 else -self._level / self._rate


class NotSent(Exception):
    """A rollout whose first request was still waiting for its turn when the collection began to drain."""


class ThrottledPolicy:
    """A policy that keeps to requests and tokens a minute."""

    def __init__(
        self,
        policy: Policy,
        requests_per_minute: float | None,
        tokens_per_minute: float | None,
        draining: asyncio.Event | None = None,
    ) -> None:
        self._policy = policy
        self._draining = draining or asyncio.Event()
        self._requests = Bucket(requests_per_minute) if requests_per_minute else None
        self._tokens = Bucket(tokens_per_minute) if tokens_per_minute else None
        self._usual_tokens = 0.0  # of one request, by what was seen

    async def act(self, request: Request) -> Completion:
        waits = [self._requests.take(1) if self._requests else 0.0]
        guess = self._usual_tokens or _rough_tokens(request)
        waits.append(self._tokens.take(guess) if self._tokens else 0.0)
        if (wait := max(waits)) > 0:
            await self._wait_turn(wait, request)
        completion = await self._policy.act(request)
        usage = completion.usage
        used = usage.input_tokens + usage.output_tokens if usage.is_known else _used(request, completion)
        if self._tokens is not None:
            self._tokens.take(used - guess)
        self._usual_tokens += 0.1 * (used - self._usual_tokens) if self._usual_tokens else used
        return completion

    async def close(self) -> None:
        await self._policy.close()

    async def _wait_turn(self, wait: float, request: Request) -> None:
        """A minute's budget may keep hundreds waiting for minutes; a drain does not wait for them."""
        if request.turn > 0:
            await asyncio.sleep(wait)  # an episode under way may finish
            return
        try:
            async with asyncio.timeout(wait):
                await self._draining.wait()
        except TimeoutError:
            return
        raise NotSent


def _rough_tokens(request: Request) -> float:
    """Four characters a token, and as much for the answer as it may take."""
    most = request.params.get("max_output_tokens")
    return _by_length(request.messages) + (most if isinstance(most, int | float) else 0)


def _used(request: Request, completion: Completion) -> float:
    """By what the server sent, if not usage."""
    sampled = completion.token_ids or completion.logprobs
    said = len(sampled) if sampled else _by_length([completion.message])
    return _by_length(request.messages) + said


def _by_length(messages: Sequence[Message]) -> float:
    written = ("content", "reasoning_content", "tool_calls")
    return (
        sum(len(str(message.get(name) or "")) for message in messages for name in written)
        / _CHARACTERS_A_TOKEN
    )
