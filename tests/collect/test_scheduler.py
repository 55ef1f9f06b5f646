"""The loop that keeps so many in flight, tries again and drains."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from rollbook.collect.rows import Item, Outcome
from rollbook.collect.scheduler import Scheduler
from rollbook.rollouts.limits import Concurrency
from rollbook.rollouts.retry import Attempts, RetrySettings
from rollbook.rollouts.types import FailureKind


class Server:
    """An executor that fails each item so many times, and knows how many were there at once."""

    def __init__(self, failures: int, kind: FailureKind = FailureKind.SERVER_ERROR) -> None:
        self._failures, self._kind = failures, kind
        self.asked: dict[int, int] = {}
        self.now = self.most = 0

    def drain(self) -> None:
        return None

    async def run(self, item: Item, *, alone: bool = False) -> Outcome:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.001)
        self.now -= 1
        self.asked[item.row] = self.asked.get(item.row, 0) + 1
        outcome = Outcome(item.row, item.repeat, line=b"{}")
        if self.asked[item.row] <= self._failures:
            outcome.failure = self._kind
        return outcome

    async def close(self) -> None:
        return None


class Seen:
    """A sink that remembers."""

    def __init__(self) -> None:
        self.finished: list[int] = []
        self.given_up: list[tuple[int, int]] = []
        self.waits: list[float] = []
        self.stop: str | None = None

    def done(self, item: Item, outcome: Outcome) -> None:
        self.finished.append(item.row)

    def failed(self, item: Item, outcome: Outcome, attempts: Attempts) -> None:
        self.given_up.append((item.row, len(attempts.failures)))

    def retrying(self, item: Item, outcome: Outcome, wait: float) -> None:
        self.waits.append(wait)

    def should_stop(self) -> str | None:
        return self.stop


def endless() -> Iterator[Item]:
    number = 0
    while True:
        yield Item(number, 0, str(number), b"")
        number += 1


def some(count: int) -> Iterator[Item]:
    return (item for item, _ in zip(endless(), range(count), strict=False))


def schedule(server: Server, sink: Seen, items: Iterator[Item], most: int = 4, **retry: float) -> Scheduler:
    settings = RetrySettings(first_wait_s=0.001, **retry)  # type: ignore[arg-type]
    return Scheduler(items, server, sink, Concurrency(most, adaptive=False), settings)


def test_the_scheduler_does_each_item_until_it_is_done() -> None:
    async def play() -> None:
        server, sink = Server(failures=2), Seen()
        await schedule(server, sink, some(20)).run()
        assert sorted(sink.finished) == list(range(20))
        assert set(server.asked.values()) == {3}
        assert server.most == 4
        assert len(sink.waits) == 40

    asyncio.run(play())


def test_the_scheduler_gives_up_when_the_budget_is_spent() -> None:
    async def play() -> None:
        server, sink = Server(failures=99), Seen()
        await schedule(server, sink, some(5), server_error=3).run()
        assert (sink.finished, sorted(sink.given_up)) == ([], [(number, 3) for number in range(5)])

    asyncio.run(play())


def test_items_that_wait_hold_no_slot_and_do_not_pile_up() -> None:
    async def play() -> None:
        server, sink = Server(failures=1), Seen()
        scheduler = schedule(server, sink, endless(), most=4)
        scheduler._retry = RetrySettings(first_wait_s=3600, longest_wait_s=3600)
        running = asyncio.ensure_future(scheduler.run())
        await asyncio.sleep(0.1)
        assert scheduler.in_flight == 0
        assert 8 <= scheduler.waiting <= 12  # twice the concurrency, and what was under way then
        scheduler.drain()
        await running
        assert sink.finished == []

    asyncio.run(play())


def test_a_draining_scheduler_does_not_turn_over_retries_that_are_due(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def play() -> None:
        scheduler = schedule(Slow(), Seen(), some(2), most=4)  # slots are free
        running = asyncio.ensure_future(scheduler.run())
        await asyncio.sleep(0.05)
        scheduler.drain()
        scheduler._waiting = [(0.0, 0, next(some(1)))]
        turns, fill = 0, scheduler._fill

        def counted() -> None:
            nonlocal turns
            turns += 1
            fill()

        monkeypatch.setattr(scheduler, "_fill", counted)
        await running
        assert turns < 10

    class Slow(Server):
        def __init__(self) -> None:
            super().__init__(failures=0)

        async def run(self, item: Item, *, alone: bool = False) -> Outcome:
            await asyncio.sleep(0.3)
            return Outcome(item.row, item.repeat, line=b"{}")

    asyncio.run(play())


def test_a_draining_scheduler_finishes_what_is_in_flight() -> None:
    class Enough(Seen):
        def done(self, item: Item, outcome: Outcome) -> None:
            super().done(item, outcome)
            if len(self.finished) == 10:
                scheduler.drain()

    async def play() -> None:
        await scheduler.run()
        assert sorted(sink.finished) == list(range(len(server.asked)))
        assert 10 <= len(sink.finished) <= 13

    server, sink = Server(failures=0), Enough()
    scheduler = schedule(server, sink, endless(), most=4)
    asyncio.run(play())


def test_an_error_of_the_sink_ends_the_scheduler() -> None:
    class Full(Seen):
        def done(self, item: Item, outcome: Outcome) -> None:
            raise OSError("the disk is full")

    async def play() -> None:
        with pytest.raises(OSError, match="the disk is full"):
            await schedule(Server(failures=0), Full(), endless()).run()

    asyncio.run(play())
