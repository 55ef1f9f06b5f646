"""The loop: keep the allowed number of rollouts in flight, each (task, repeat) until it is done or given up.

Items are drawn from the plan one by one, so memory does not grow with the input. A failed item waits out
its back-off without holding a slot. Results are handed on the moment they are in; they count when the sink
says that they are on the disk.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import time
from collections.abc import Iterator
from typing import Protocol

import msgspec

from rollbook.collect.executor import Executor, cancelled_by_itself
from rollbook.collect.rows import Item, Outcome
from rollbook.records.plain import utc_now
from rollbook.rollouts.limits import Concurrency
from rollbook.rollouts.retry import Attempts, RetrySettings
from rollbook.rollouts.types import FailureKind

_CLEAN_UP_S = 3.0


class Sink(Protocol):
    """Where outcomes go."""

    def done(self, item: Item, outcome: Outcome) -> None: ...

    def failed(self, item: Item, outcome: Outcome, attempts: Attempts) -> None: ...

    def retrying(self, item: Item, outcome: Outcome, wait: float) -> None: ...

    def should_stop(self) -> str | None:
        """Why no new work may be started, if so."""


class Scheduler:
    def __init__(
        self,
        items: Iterator[Item],
        executor: Executor,
        sink: Sink,
        concurrency: Concurrency,
        retry: RetrySettings,
    ) -> None:
        self._items = items
        self._executor = executor
        self._sink = sink
        self.concurrency = concurrency
        self._retry = retry
        self._chance = random.Random()
        self._waiting: list[tuple[float, int, Item]] = []  # until when, tie-breaker, what
        self._attempts: dict[tuple[int, int], Attempts] = {}
        self._flying: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._error: BaseException | None = None
        self._exhausted = False
        self._draining = False
        self._lets_go = False
        self._ending = False
        self._order = 0

    @property
    def in_flight(self) -> int:
        return len(self._flying)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def drain(self) -> None:
        """Start nothing new; what is in flight may finish. Items waiting for a retry are left undone."""
        self._draining = True
        self._executor.drain()
        self._wake.set()

    def let_go(self) -> None:
        """End without waiting for what is in flight, which is left undone."""
        self._lets_go = True
        self._wake.set()

    async def run(self) -> None:
        try:
            while self._error is None:
                self._wake.clear()
                self._fill()
                if self._lets_go:
                    return
                if not self._flying and (self._draining or self._is_finished()):
                    return
                await self._sleep()
            raise self._error
        finally:
            self._ending = True
            for task in list(self._flying):
                task.cancel()
            if self._flying:  # whoever takes longer to clean up is left at it
                await asyncio.wait(self._flying, timeout=_CLEAN_UP_S)

    def _is_finished(self) -> bool:
        return self._exhausted and not self._waiting

    def _fill(self) -> None:
        loop = asyncio.get_running_loop()
        while len(self._flying) < self.concurrency.limit and not self._draining:
            if self._sink.should_stop() is not None:
                self.drain()
                return
            item = self._next()
            if item is None:
                return
            task = loop.create_task(self._attempt(item))
            self._flying.add(task)
            task.add_done_callback(self._landed)

    def _next(self) -> Item | None:
        if self._waiting and self._waiting[0][0] <= time.monotonic():
            return heapq.heappop(self._waiting)[2]
        # While many wait, the server is in trouble: new items would only join the queue, and fill memory.
        if self._exhausted or len(self._waiting) >= 2 * self.concurrency.most:
            return None
        item = next(self._items, None)
        self._exhausted = item is None
        return item

    def _landed(self, task: asyncio.Task[None]) -> None:
        self._flying.discard(task)
        self._wake.set()
        if not task.cancelled() and task.exception() is not None:
            self._error = self._error or task.exception()

    async def _sleep(self) -> None:
        """Until something lands, or the next retry is due."""
        timer = None
        if self._waiting and not self._draining and len(self._flying) < self.concurrency.limit:
            due = self._waiting[0][0] - time.monotonic()
            timer = asyncio.get_running_loop().call_later(max(0.0, due), self._wake.set)
        try:
            await self._wake.wait()
        finally:
            if timer is not None:
                timer.cancel()

    async def _attempt(self, item: Item) -> None:
        started = time.monotonic()
        before = self._attempts.get((item.row, item.repeat))
        alone = before is not None and before.may_be_the_culprit(self._retry)
        try:
            outcome = await self._executor.run(item, alone=alone)
        except asyncio.CancelledError:
            if self._ending:
                raise
            outcome = cancelled_by_itself(item)
        if outcome.not_sent or self._ending:  # let go of: nobody takes it any more
            return
        kind = outcome.failure
        if kind is None:
            self.concurrency.succeeded()
            self._attempts.pop((item.row, item.repeat), None)
            self._sink.done(item, outcome)
            return
        self.concurrency.failed(kind, started)
        attempts = self._note(item, kind, outcome)
        if not attempts.may_retry(kind, self._retry):
            del self._attempts[item.row, item.repeat]
            self._sink.failed(item, outcome, attempts)
        else:
            wait = 0.0
            if kind is not FailureKind.WORKER_LOST:
                wait = attempts.wait(outcome.retry_after, self._retry, self._chance)
            self._sink.retrying(item, outcome, wait)
            if self._draining:
                return
            if outcome.reply is not None:
                item = msgspec.structs.replace(item, reply=outcome.reply)
            self._order += 1
            heapq.heappush(self._waiting, (time.monotonic() + wait, self._order, item))

    def _note(self, item: Item, kind: str, outcome: Outcome) -> Attempts:
        attempts = self._attempts.setdefault((item.row, item.repeat), Attempts())
        attempts.failures.append(
            {
                "kind": str(kind),
                "message": outcome.message,
                "status": outcome.status,
                "input_tokens": outcome.input_tokens,
                "output_tokens": outcome.output_tokens,
                "seconds": round(outcome.seconds, 3),
                "at": utc_now(),
            }
        )
        return attempts
