"""How much may be under way: a number of rollouts that adapts, and budgets a minute.

The number of rollouts in flight grows by one for every round of successes and halves when the server pushes
back, at most once for the requests that were already on their way (TCP's rule, for TCP's reason). Requests
and tokens a minute are buckets that fill steadily; tokens are settled after the fact, because nobody knows
them before: until the first answer the length of the request and the most it may be answered stand for them,
then the usual of late. A request that names no most is alone under way until that first answer: a hundred of
unknown size would spend many minutes' tokens at once. Where the server does not count, the length of what was
asked and answered does.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from rollbook.rollouts.failures import NotSent
from rollbook.rollouts.types import Completion, FailureKind, Message, Policy, Request

_PUSH_BACK = frozenset({FailureKind.RATE_LIMIT, FailureKind.SERVER_ERROR, FailureKind.TIMEOUT})
_BURST_SECONDS = 1.0
_LOOK_AGAIN_SECONDS = 1.0  # what answers tell meanwhile makes a wait longer or shorter
_NO_TIME = 1e-6  # what rounding leaves of a wait that is over
_CHARACTERS_A_TOKEN = 4
_MOST = ("max_output_tokens", "max_tokens", "max_completion_tokens")


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


class ThrottledPolicy:
    """A policy that keeps to requests and tokens a minute; `params` are those it adds to every request."""

    def __init__(
        self,
        policy: Policy,
        requests_per_minute: float | None,
        tokens_per_minute: float | None,
        draining: asyncio.Event | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> None:
        self._policy = policy
        self._params = params or {}
        self._draining = draining or asyncio.Event()
        self._requests = Bucket(requests_per_minute) if requests_per_minute else None
        self._tokens = Bucket(tokens_per_minute) if tokens_per_minute else None
        self._line: deque[asyncio.Event] = deque()  # a place for each who is not sent yet
        self._answers = 0
        self._usual_tokens = 0.0  # of one request, by what was seen

    async def act(self, request: Request) -> Completion:
        async with self._turn(request):
            guess = await self._within_budget(request)
            if not self._has_a_size(request):
                return await self._ask(request, guess)  # those behind wait for what it tells of theirs
        return await self._ask(request, guess)

    async def close(self) -> None:
        await self._policy.close()

    @asynccontextmanager
    async def _turn(self, request: Request) -> AsyncIterator[None]:
        """One after the other, in the order in which they came."""
        place = asyncio.Event()
        self._line.append(place)
        try:
            if self._line[0] is not place:
                await self._unless_drained(place.wait(), request)
            yield
        finally:
            self._line.remove(place)
            if self._line:
                self._line[0].set()

    async def _within_budget(self, request: Request) -> float:
        """Take a request and its tokens, wait until it was fair to, and return how many tokens."""
        guess = self._guess(request)
        wait = self._take(1, guess)
        try:
            while wait > _NO_TIME:
                await self._unless_drained(asyncio.sleep(min(wait, _LOOK_AGAIN_SECONDS)), request)
                before, guess = guess, self._guess(request)
                wait = self._take(0, guess - before)
        except BaseException:
            self._take(-1, -guess)
            raise
        return guess

    async def _ask(self, request: Request, guess: float) -> Completion:
        completion = await self._policy.act(request)
        if self._tokens is not None:
            usage = completion.usage
            used = usage.input_tokens + usage.output_tokens if usage else _used(request, completion)
            self._tokens.take(used - guess)
            self._answers += 1
            self._usual_tokens += (used - self._usual_tokens) * max(0.1, 1 / self._answers)
        return completion

    def _take(self, requests: float, tokens: float) -> float:
        waits = [self._requests.take(requests) if self._requests else 0.0]
        waits.append(self._tokens.take(tokens) if self._tokens else 0.0)
        return max(waits)

    def _guess(self, request: Request) -> float:
        """The tokens that it will use: four characters each, and as much for the answer as it may take."""
        if self._tokens is None:
            return 0.0
        return self._usual_tokens if self._answers else _by_length(request.messages) + self._most(request)

    def _has_a_size(self, request: Request) -> bool:
        return self._tokens is None or self._answers > 0 or self._most(request) > 0

    def _most(self, request: Request) -> float:
        """The tokens that the answer may take, 0 if nobody said."""
        named = [params.get(name) for params in (request.params, self._params) for name in _MOST]
        return next((most for most in named if isinstance(most, int | float)), 0)

    async def _unless_drained(self, event: Coroutine[Any, Any, object], request: Request) -> None:
        """A minute's budget may keep hundreds waiting for minutes; a drain does not wait for them."""
        if request.turn > 0:
            await event  # an episode under way may finish
            return
        waits = [asyncio.ensure_future(event), asyncio.ensure_future(self._draining.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self._draining.is_set():
            raise NotSent


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
