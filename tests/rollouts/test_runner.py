"""The loop that keeps so many rollouts in flight, tries again, stops and abandons."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import aclosing
from typing import Any

import pytest

from rollbook.errors import WriteError
from rollbook.records.turns import Turn, Usage
from rollbook.rollouts.retry import RetrySettings
from rollbook.rollouts.runner import Done, GivenUp, Retry, Stop, run_all
from rollbook.rollouts.types import Episode, FailureKind, RolloutFailure

QUICK = RetrySettings(first_wait_s=0.0)


class Work:
    """Fails each item so many times, and knows how many were there at once."""

    def __init__(self, failures: int = 0, kind: FailureKind = FailureKind.SERVER_ERROR) -> None:
        self._failures, self._kind = failures, kind
        self.asked: Counter[int] = Counter()
        self.now = self.most = 0

    async def __call__(self, item: int) -> str:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0)
        self.now -= 1
        self.asked[item] += 1
        if self.asked[item] <= self._failures:
            raise RolloutFailure(self._kind, "no")
        return f"result {item}"


async def _events(items: Iterable[Any], work: Any, **settings: Any) -> list[Any]:
    async with aclosing(run_all(items, work, **{"retry": QUICK, **settings})) as events:
        return [event async for event in events]


def _run(items: Iterable[Any], work: Any, **settings: Any) -> list[Any]:
    return asyncio.run(_events(items, work, **settings))


def test_each_item_is_tried_until_it_is_done() -> None:
    work = Work(failures=2)
    events = _run(range(20), work, concurrency=4)
    done = [event for event in events if isinstance(event, Done)]
    assert sorted(event.item for event in done) == list(range(20))
    assert {event.result for event in done} == {f"result {number}" for number in range(20)}
    assert {len(event.attempts.failures) for event in done} == {2}
    assert set(work.asked.values()) == {3}
    assert work.most == 4
    assert sum(isinstance(event, Retry) for event in events) == 40


def test_an_item_is_given_up_when_its_budget_is_spent() -> None:
    events = _run(range(5), Work(failures=99), retry=RetrySettings(first_wait_s=0.0, server_error=3))
    given_up = [event for event in events if isinstance(event, GivenUp)]
    assert sorted(event.item for event in given_up) == list(range(5))
    assert {event.failure.kind for event in given_up} == {FailureKind.SERVER_ERROR}
    assert [len(event.attempts.failures) for event in given_up] == [3] * 5


def test_failures_are_noted_with_what_they_cost() -> None:
    async def work(item: int) -> None:
        failure = RolloutFailure(FailureKind.ENVIRONMENT, "broken", status=500)
        turns = [Turn(messages=[], usage=Usage(3, 2)), Turn(messages=[])]
        failure.episode = Episode([], turns=turns)
        raise failure

    ((noted,),) = [event.attempts.failures for event in _run([1], work)]
    assert (noted["kind"], noted["message"], noted["status"]) == ("environment", "broken", 500)
    assert (noted["input_tokens"], noted["output_tokens"]) == (3, 2)


def test_items_that_wait_hold_no_slot_and_do_not_pile_up() -> None:
    async def main() -> None:
        stop = Stop()
        runner = run_all(
            itertools.count(),
            Work(failures=1),
            concurrency=4,
            retry=RetrySettings(first_wait_s=3600, longest_wait_s=3600),
            stop=stop,
        )
        async with aclosing(runner) as events:
            retries = []
            async for event in events:
                retries.append(event)
                if not runner.num_in_flight and not runner._landed:
                    stop.request("enough")
        assert all(isinstance(event, Retry) for event in retries)
        assert 8 <= len(retries) <= 12  # twice the concurrency, and what was under way then

    asyncio.run(main())


def test_an_item_may_be_replaced_before_it_is_tried_again() -> None:
    async def work(item: str) -> str:
        if item == "first":
            raise RolloutFailure(FailureKind.JUDGE, "later")
        return item

    async def main() -> list[Any]:
        results = []
        async with aclosing(run_all(["first"], work, retry=QUICK)) as events:
            async for event in events:
                if isinstance(event, Retry):
                    event.item = "second"
                else:
                    results.append(event)
        return results

    (done,) = asyncio.run(main())
    assert (done.item, done.result) == ("second", "second")


def test_what_is_in_flight_finishes_after_a_stop_and_nothing_new_is_started() -> None:
    stop, work, done = Stop(), Work(), []

    async def main() -> None:
        async with aclosing(run_all(itertools.count(), work, concurrency=4, stop=stop)) as events:
            async for event in events:
                done.append(event.item)
                if len(done) == 10:
                    stop.request("enough")
                    stop.request("again")

    asyncio.run(main())
    assert sorted(done) == sorted(work.asked)
    assert 10 <= len(done) <= 18  # what had landed and what was in flight then
    assert (stop.reason, stop.abandoned) == ("enough", 0)


def test_a_stop_from_another_thread_is_heard() -> None:
    stop, started = Stop(), threading.Event()

    async def main() -> list[Any]:
        released, loop = asyncio.Event(), asyncio.get_running_loop()

        async def work(item: int) -> int:
            started.set()
            await released.wait()
            return item

        def ask() -> None:
            started.wait()
            stop.request("from a thread")
            loop.call_soon_threadsafe(released.set)

        thread = threading.Thread(target=ask)
        thread.start()
        events = await _events(itertools.count(), work, concurrency=2, stop=stop)
        thread.join()
        return events

    assert sorted(event.item for event in asyncio.run(main())) == [0, 1]


def test_nothing_is_started_after_a_stop_that_came_before() -> None:
    stop, work = Stop(), Work()
    stop.request("not today")
    assert _run(range(5), work, stop=stop) == []
    assert not work.asked


def test_what_takes_longer_than_the_patience_is_abandoned() -> None:
    stop, cancelled = Stop(), []

    async def work(item: int) -> int:
        stop.request("enough")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(item)
            raise
        return item

    assert _run(range(3), work, concurrency=3, stop=stop, abandon_after_s=0.01) == []
    assert (stop.abandoned, sorted(cancelled)) == (3, [0, 1, 2])


def test_an_attempt_that_takes_too_long_is_a_timeout() -> None:
    async def work(item: int) -> None:
        await asyncio.Event().wait()

    events = _run([1], work, timeout_s=0.01, retry=RetrySettings(timeout=2, first_wait_s=0.0))
    assert [type(event) for event in events] == [Retry, GivenUp]
    assert events[1].failure.kind is FailureKind.TIMEOUT
    assert "took longer than 0.01 s" in str(events[1].failure)


def _raises(error: BaseException) -> Callable[[int], Any]:
    async def work(item: int) -> None:
        raise error

    return work


class Panic(BaseException):
    """As code in Rust raises it."""


async def _cancels_itself(item: int) -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (_raises(KeyError("x")), r"KeyError: 'x' \(.*test_runner\.py:\d+\)"),
        (_raises(Panic("p")), "Panic: p"),
        (_raises(asyncio.CancelledError()), "cancelled by the environment's or the policy's own code"),
        (_cancels_itself, "cancelled by the environment's or the policy's own code"),
    ],
)
def test_whatever_somebodys_code_raises_is_the_failure_of_its_item(work: Any, message: str) -> None:
    first, second = _run([1, 2], work)
    assert isinstance(first, GivenUp) and isinstance(second, GivenUp)
    assert first.failure.kind is FailureKind.ENVIRONMENT
    with pytest.raises(RolloutFailure, match=message):
        raise first.failure


def test_an_error_of_ours_ends_the_run_and_cancels_the_rest() -> None:
    cancelled = []

    async def work(item: int) -> None:
        if item == 0:
            raise WriteError("the disk is full")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(item)
            raise

    with pytest.raises(WriteError, match="the disk is full"):
        _run(range(3), work, concurrency=3)
    assert cancelled == [1, 2]


def test_who_leaves_the_loop_leaves_nothing_in_flight() -> None:
    cancelled = []

    async def work(item: int) -> int:
        if item == 0:
            return 0
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(item)
            raise
        return item

    async def main() -> None:
        async with aclosing(run_all(range(10), work, concurrency=3)) as events:
            async for event in events:
                assert event.item == 0
                break
        assert sorted(cancelled) == [1, 2]

    asyncio.run(main())


def test_it_says_what_is_in_flight() -> None:
    async def work(item: str) -> str:
        if item == "slow":
            await waiting.wait()
        return item

    async def main() -> None:
        nonlocal waiting
        waiting = asyncio.Event()
        runner = run_all(["slow", "quick"], work)
        async with aclosing(runner) as events:
            async for event in events:
                if event.item == "quick":
                    ((item, seconds),) = runner.in_flight
                    assert item == "slow" and seconds >= 0
                    waiting.set()

    waiting = asyncio.Event()
    asyncio.run(main())


def test_it_works_from_a_thread_and_in_a_running_loop() -> None:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.extend(_run(range(3), Work(), concurrency=2)))
    thread.start()
    thread.join()

    async def notebook() -> None:
        results.extend(await _events(range(3), Work(), concurrency=2))

    asyncio.run(notebook())
    assert [event.item for event in results] == [0, 1, 2, 0, 1, 2]
