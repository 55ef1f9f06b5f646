"""`run_all`: keep so many rollouts in flight, each until it is done or given up; one event for each outcome.

    stop = Stop()
    async with aclosing(run_all(items, work, concurrency=128, stop=stop)) as events:
        async for event in events:
            match event:
                case Done(item, result): ...
                case Retry(item, failure): ...        # it will be tried again
                case GivenUp(item, failure, attempts): ...

Items are drawn one by one, so memory does not grow with their number, and nothing is drawn while the caller
works on an event. A failed item waits out its back-off without holding a slot. `work` raises RolloutFailure
where it has no result; whatever else somebody's code raises is a failure of that item, too. Only errors of
ours (RollbookError: a full disk) end the run. After `stop.request(...)` nothing new is started and what is
in flight may finish, for `abandon_after_s` at the most; items that are left get no event.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any, Generic, NamedTuple, TypeVar

from rollbook.errors import RollbookError
from rollbook.rollouts.concurrency import Concurrency
from rollbook.rollouts.episode import time_limit
from rollbook.rollouts.failures import error_with_place
from rollbook.rollouts.limits import Budget, Spent
from rollbook.rollouts.retry import Attempts, RetrySettings
from rollbook.rollouts.types import FailureKind, RolloutFailure

_CLEAN_UP_S = 3.0
I = TypeVar("I")  # noqa: E741 - an item
T = TypeVar("T")


class Done(NamedTuple, Generic[I, T]):
    item: I
    result: T
    seconds: float
    attempts: Attempts  # the failures before


class Retry(Generic[I]):
    """A failure that is tried again. `item` may be replaced by what is to be tried then."""

    __match_args__ = ("item", "failure", "wait", "attempts")

    def __init__(self, item: I, failure: RolloutFailure, wait: float, attempts: Attempts) -> None:
        self.item, self.failure, self.wait, self.attempts = item, failure, wait, attempts


class GivenUp(NamedTuple, Generic[I]):
    item: I
    failure: RolloutFailure
    attempts: Attempts  # all of them


class Stop:
    """Asks a run to start nothing new, from any thread or signal handler, before or after it began."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.abandoned = 0  # rollouts that were in flight when the patience ended
        self._listeners: list[Callable[[], Any]] = []

    def request(self, reason: str) -> None:
        self.reason = self.reason or reason
        for listener in list(self._listeners):
            listener()

    def listen(self, listener: Callable[[], Any]) -> Callable[[], None]:
        """Call this at each request; returns what ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)


def run_all(
    items: Iterable[I],
    work: Callable[[I], Awaitable[T]],
    *,
    concurrency: int | Concurrency = 128,
    budget: Budget | None = None,
    retry: RetrySettings | None = None,
    stop: Stop | None = None,
    timeout_s: float | None = None,
    abandon_after_s: float | None = None,
) -> Runner[I, T]:
    """`timeout_s` limits one attempt, whatever `work` waits for; `budget` says when the next may start."""
    if isinstance(concurrency, int):
        concurrency = Concurrency(concurrency, adaptive=False)
    retry, stop = retry or RetrySettings(), stop or Stop()
    return Runner(items, work, concurrency, budget, retry, stop, timeout_s, abandon_after_s)


class _Flight(Generic[I, T]):
    """One attempt at an item."""

    __slots__ = ("attempts", "charged", "error", "failure", "item", "result", "seconds", "started")

    def __init__(self, item: I, attempts: Attempts) -> None:
        self.item, self.attempts = item, attempts
        self.charged = Spent()
        self.started, self.seconds = time.monotonic(), 0.0
        self.result: list[T] = []
        self.failure: RolloutFailure | None = None
        self.error: RollbookError | None = None


class Runner(Generic[I, T]):
    """The events of `run_all`, and what is in flight meanwhile."""

    def __init__(
        self,
        items: Iterable[I],
        work: Callable[[I], Awaitable[T]],
        concurrency: Concurrency,
        budget: Budget | None,
        retry: RetrySettings,
        stop: Stop,
        timeout_s: float | None,
        abandon_after_s: float | None,
    ) -> None:
        self._items, self._work = iter(items), work
        self._concurrency, self._budget, self._retry, self._stop = concurrency, budget, retry, stop
        self._timeout_s, self._abandon_after_s = timeout_s, abandon_after_s
        self._chance = random.Random()
        self._waiting: list[tuple[float, int, I, Attempts]] = []  # until when, tie-breaker
        self._flying: dict[asyncio.Task[None], _Flight[I, T]] = {}
        self._landed: deque[_Flight[I, T]] = deque()
        self._wake = asyncio.Event()
        self._exhausted = self._ending = False
        self._order = 0
        self._abandon_at: float | None = None
        self._next_flight: _Flight[I, T] | None = None  # that the budget does not allow yet
        self._start_at: float | None = None  # when it does
        self._events = self._run()

    @property
    def in_flight(self) -> list[tuple[I, float]]:
        """What is worked on now, and for how many seconds, the longest first."""
        now = time.monotonic()
        flights = ((flight.item, now - flight.started) for flight in self._flying.values())
        return sorted(flights, key=lambda pair: -pair[1])

    @property
    def num_in_flight(self) -> int:
        return len(self._flying)

    @property
    def num_waiting(self) -> int:
        """Failed items that wait to be tried again."""
        return len(self._waiting)

    def what_a_stop_does(self) -> str:
        """In words, for people."""
        return f"starting no new rollouts, waiting for {self.num_in_flight} in flight"

    def __aiter__(self) -> AsyncGenerator[Done[I, T] | Retry[I] | GivenUp[I], None]:
        return self._events

    async def __anext__(self) -> Done[I, T] | Retry[I] | GivenUp[I]:
        return await anext(self._events)

    async def aclose(self) -> None:
        """Cancel what is in flight, and wait until it has cleaned up."""
        await self._events.aclose()

    async def _run(self) -> AsyncGenerator[Done[I, T] | Retry[I] | GivenUp[I], None]:
        loop = asyncio.get_running_loop()
        unlisten = self._stop.listen(lambda: loop.call_soon_threadsafe(self._wake.set))
        try:
            while True:
                self._wake.clear()
                while self._landed:  # before anything new begins: the caller may want to stop
                    flight = self._landed.popleft()
                    if flight.error is not None:
                        raise flight.error
                    if flight.failure is not None:
                        event = self._failed(flight, flight.failure)
                        yield event
                        if isinstance(event, Retry):
                            self._put_back(event)
                    elif flight.result:
                        self._concurrency.succeeded(flight.started, flight.seconds)
                        yield Done(flight.item, flight.result[0], flight.seconds, flight.attempts)
                    self._fill()
                self._fill()
                if self._is_over():
                    return
                await self._sleep()
        finally:
            unlisten()
            await self._end()

    def _is_over(self) -> bool:
        if self._stop.reason is None:
            return self._exhausted and not (self._flying or self._waiting or self._next_flight)
        if self._abandon_at is None and self._abandon_after_s is not None:
            self._abandon_at = time.monotonic() + self._abandon_after_s
        if self._flying and self._abandon_at is not None and self._abandon_at <= time.monotonic():
            self._stop.abandoned = len(self._flying)
            return True
        return not self._flying

    def _fill(self) -> None:
        loop = asyncio.get_running_loop()
        self._start_at = None
        while len(self._flying) < self._concurrency.limit and self._stop.reason is None:
            self._next_flight = flight = self._next_flight or self._next()
            if flight is None:
                return
            if self._budget is not None:
                if (wait := self._budget.wait()) != 0.0:
                    self._start_at = None if wait is None else time.monotonic() + wait
                    return
                flight.charged = self._budget.start()
            self._next_flight = None
            task = loop.create_task(self._attempt(flight))
            self._flying[task] = flight
            task.add_done_callback(self._land)

    def _next(self) -> _Flight[I, T] | None:
        if self._waiting and self._waiting[0][0] <= time.monotonic():
            _, _, item, attempts = heapq.heappop(self._waiting)
            return _Flight(item, attempts)
        # While many wait, the server is in trouble: new items would only join the queue, and fill memory.
        if self._exhausted or len(self._waiting) >= 2 * self._concurrency.most:
            return None
        for item in self._items:
            return _Flight(item, Attempts())
        self._exhausted = True
        return None

    async def _attempt(self, flight: _Flight[I, T]) -> None:
        try:
            async with time_limit(self._timeout_s, lambda: "the rollout"):
                flight.result.append(await self._work(flight.item))
        except RolloutFailure as failure:
            flight.failure = failure
        except RollbookError as error:
            flight.error = error
        except BaseException as error:
            if self._ending or isinstance(error, KeyboardInterrupt):
                raise
            why = error_with_place(error)
            if isinstance(error, asyncio.CancelledError):
                why = "the rollout's task was cancelled by the environment's or the policy's own code"
            flight.failure = RolloutFailure(FailureKind.ENVIRONMENT, why)

    def _land(self, task: asyncio.Task[None]) -> None:
        flight = self._flying.pop(task)
        flight.seconds = time.monotonic() - flight.started
        if self._budget is not None:
            episode = flight.failure.episode if flight.failure else None
            self._budget.end(flight.charged, next(iter(flight.result), None), episode)
        if not self._ending:
            self._landed.append(flight)
        with suppress(asyncio.CancelledError):
            task.exception()  # which is looked at here, so that asyncio does not report it
        self._wake.set()

    def _failed(self, flight: _Flight[I, T], failure: RolloutFailure) -> Retry[I] | GivenUp[I]:
        self._concurrency.failed(failure.kind, flight.started)
        attempts = flight.attempts
        attempts.note(failure, flight.seconds)
        if not attempts.may_retry(failure.kind, self._retry):
            return GivenUp(flight.item, failure, attempts)
        wait = 0.0
        if failure.kind is not FailureKind.WORKER_LOST:
            wait = attempts.wait(failure.retry_after, self._retry, self._chance)
        return Retry(flight.item, failure, wait, attempts)

    def _put_back(self, retry: Retry[I]) -> None:
        if self._stop.reason is None:
            self._order += 1
            due = time.monotonic() + retry.wait
            heapq.heappush(self._waiting, (due, self._order, retry.item, retry.attempts))

    async def _sleep(self) -> None:
        """Until something lands or is asked, the next one is due, or the patience ends."""
        dues = [self._abandon_at, self._start_at]
        has_room = len(self._flying) < self._concurrency.limit and self._next_flight is None
        if self._waiting and self._stop.reason is None and has_room:
            dues.append(self._waiting[0][0])
        due = min((due for due in dues if due is not None), default=None)
        timer = None
        if due is not None:
            wait = max(0.0, due - time.monotonic())
            timer = asyncio.get_running_loop().call_later(wait, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            if timer is not None:
                timer.cancel()

    async def _end(self) -> None:
        self._ending = True
        for task in self._flying:
            task.cancel()
        if self._flying:  # whoever takes longer to clean up is left at it
            await asyncio.wait(list(self._flying), timeout=_CLEAN_UP_S)
