"""How much may be under way, when to try again, and when to give up."""

from __future__ import annotations

import asyncio
import math
import random
import selectors
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rollbook.records.turns import Turn, Usage
from rollbook.rollouts import concurrency, limits, runner
from rollbook.rollouts.concurrency import Concurrency
from rollbook.rollouts.limits import Bucket, Budget, Spent, spent_on_episode
from rollbook.rollouts.retry import Attempts, RetrySettings
from rollbook.rollouts.runner import Done, run_all
from rollbook.rollouts.types import Episode, FailureKind, RolloutFailure


class Clock:
    """Time that passes when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(concurrency, "time", made)
    monkeypatch.setattr(limits, "time", made)
    monkeypatch.setattr(runner, "time", made)
    return made


def failed(kind: FailureKind, times: int) -> Attempts:
    attempts = Attempts()
    attempts.failures += [{"kind": str(kind)}] * times
    return attempts


@pytest.mark.parametrize("kind", FailureKind)
def test_every_kind_has_a_budget_of_its_own(kind: FailureKind) -> None:
    settings = RetrySettings(**{str(kind): 4})
    attempts = failed(kind, 3)
    attempts.failures += [{"kind": "other"}] * 100
    assert attempts.may_retry(kind, settings)
    attempts.failures.append({"kind": str(kind)})
    assert not attempts.may_retry(kind, settings)


def test_an_invalid_request_is_not_repeated() -> None:
    assert not failed(FailureKind.INVALID_REQUEST, 1).may_retry(FailureKind.INVALID_REQUEST, RetrySettings())


def test_waits_double_up_to_the_longest_and_are_jittered() -> None:
    settings = RetrySettings(first_wait_s=1.0, longest_wait_s=8.0)
    chance = random.Random(1)
    for times, ceiling in [(1, 1), (2, 2), (3, 4), (4, 8), (5, 8), (200, 8)]:
        waits = [failed(FailureKind.TIMEOUT, times).wait(None, settings, chance) for _ in range(300)]
        assert 0 <= min(waits) < ceiling * 0.1
        assert ceiling * 0.9 < max(waits) <= ceiling


def test_retry_after_is_the_least_that_is_waited() -> None:
    settings = RetrySettings(first_wait_s=0.5, longest_wait_s=60)
    attempts = failed(FailureKind.RATE_LIMIT, 3)
    waits = [attempts.wait(20.0, settings, random.Random(seed)) for seed in range(100)]
    assert min(waits) >= 20 and max(waits) <= 22.1
    assert len(set(waits)) > 50


@pytest.mark.parametrize("retry_after", [0.0, 0.01, math.nan])
def test_a_retry_after_of_nothing_does_not_cancel_the_back_off(retry_after: float) -> None:
    settings = RetrySettings(first_wait_s=1.0, longest_wait_s=8.0)
    for times, ceiling in [(1, 1), (4, 8), (5000, 8)]:
        attempts = failed(FailureKind.RATE_LIMIT, times)
        waits = [attempts.wait(retry_after, settings, random.Random(seed)) for seed in range(300)]
        assert ceiling * 0.9 < max(waits) <= ceiling + 0.1
        assert sum(waits) / len(waits) > ceiling * 0.4


def test_a_retry_after_of_years_is_not_waited_out() -> None:
    settings = RetrySettings(longest_retry_after_s=100)
    assert 100 <= failed(FailureKind.RATE_LIMIT, 1).wait(1e9, settings, random.Random(1)) <= 111


@pytest.mark.parametrize(
    ("losses", "budget", "alone"), [(0, 1, False), (1, 3, False), (2, 3, True), (1, 2, True)]
)
def test_the_last_attempt_at_what_was_lost_is_made_alone(losses: int, budget: int, alone: bool) -> None:
    attempts = failed(FailureKind.WORKER_LOST, losses)
    assert attempts.may_be_the_culprit(RetrySettings(worker_lost=budget)) is alone


class Feed:
    """Tells a Concurrency of attempts that end one after another, as a server would make them end."""

    def __init__(self, clock: Clock, most: int, *, adaptive: bool = True) -> None:
        self._clock = clock
        self.concurrency = Concurrency(most, adaptive=adaptive)

    @property
    def limit(self) -> int:
        return self.concurrency.limit

    def served(self, count: int = 1, *, seconds: float = 1.0, every_s: float = 0.01) -> None:
        for _ in range(count):
            self._clock.now += every_s
            self.concurrency.succeeded(self._clock.now - seconds, seconds)

    def refused(
        self, count: int = 1, *, kind: FailureKind = FailureKind.RATE_LIMIT, began: float = 0.001
    ) -> None:
        for _ in range(count):
            self._clock.now += began
            self.concurrency.failed(kind, self._clock.now - began / 2)


@pytest.mark.parametrize("kind", [FailureKind.RATE_LIMIT, FailureKind.SERVER_ERROR, FailureKind.TIMEOUT])
def test_single_errors_slow_nothing_down(kind: FailureKind, clock: Clock) -> None:
    feed = Feed(clock, 64)
    for _ in range(100):  # five of a hundred, in pairs and alone
        feed.served(38)
        feed.refused(2, kind=kind)
        feed.served(22)
        feed.refused(kind=kind)
        assert feed.limit == 64


@pytest.mark.parametrize("kind", [FailureKind.RATE_LIMIT, FailureKind.SERVER_ERROR, FailureKind.TIMEOUT])
def test_overload_lowers_the_number_to_a_little_less_than_was_served_at_a_time(
    kind: FailureKind, clock: Clock
) -> None:
    feed = Feed(clock, 64)
    feed.served(64, seconds=2.0, every_s=0.05)  # forty at a time
    while feed.limit == 64:
        feed.served(2, seconds=2.0, every_s=0.05)
        feed.refused(kind=kind)
    assert 34 <= feed.limit <= 36


def test_one_moment_lowers_the_number_to_a_half_at_most_and_by_a_tenth_at_least(clock: Clock) -> None:
    feed = Feed(clock, 64)
    feed.refused(7)  # nothing was served yet
    assert feed.limit == 32
    feed = Feed(clock, 64)
    feed.served(64, every_s=0.0)  # all in the same moment
    feed.refused(7)
    assert feed.limit == 57


def test_what_began_before_the_number_was_lowered_does_not_lower_it_again(clock: Clock) -> None:
    feed, began = Feed(clock, 64), clock.now
    feed.refused(7)
    for _ in range(500):
        feed.concurrency.failed(FailureKind.RATE_LIMIT, began)
    assert feed.limit == 32


def test_a_server_that_takes_nothing_is_left_alone_soon(clock: Clock) -> None:
    feed = Feed(clock, 128)
    feed.refused(60)
    assert feed.limit == 1
    feed.refused(1000)
    assert feed.limit == 1


def test_the_number_grows_by_one_a_round_and_carefully_where_it_was_too_many(clock: Clock) -> None:
    feed = Feed(clock, 8)
    feed.refused(6)
    assert feed.limit == 4
    feed.served(5)
    assert feed.limit == 5
    feed.served(13)
    assert feed.limit == 7  # one more was too many
    feed.served(8 * 7)
    assert feed.limit == 7
    feed.served(8 * 7)
    assert feed.limit == 8
    feed.served(100)
    assert feed.limit == 8


@pytest.mark.parametrize(
    "kind", [FailureKind.ENVIRONMENT, FailureKind.INVALID_REQUEST, FailureKind.BAD_ANSWER]
)
def test_failures_that_are_no_push_back_slow_nothing_down(kind: FailureKind, clock: Clock) -> None:
    feed = Feed(clock, 8)
    feed.refused(100, kind=kind)
    assert feed.limit == 8


def test_concurrency_that_is_not_adaptive_stays(clock: Clock) -> None:
    feed = Feed(clock, 8, adaptive=False)
    feed.refused(100)
    feed.served()
    assert feed.limit == 8


def test_a_bucket_gives_so_many_a_minute(clock: Clock) -> None:
    bucket = Bucket(600)  # ten a second

    def takes_at_once() -> int:
        count = 0
        while bucket.wait(1) == 0.0:
            bucket.take(1)
            count += 1
        return count

    assert takes_at_once() == 10
    assert bucket.wait(1) == pytest.approx(0.1)
    assert bucket.wait(2) == pytest.approx(0.2)
    clock.now += 60
    assert takes_at_once() == 10  # a minute's rest is no minute's burst
    bucket.take(50)
    assert bucket.wait(1) == pytest.approx(5.1)  # what is owed comes first


def test_a_bucket_of_less_than_one_a_second_still_gives_one_at_once(clock: Clock) -> None:
    bucket = Bucket(6)
    assert bucket.wait(100) == 0.0
    bucket.take(1)
    assert bucket.wait(1) == pytest.approx(10.0)


class Server:
    """Work of half a second that uses so much each time, or fails; notes when it began."""

    def __init__(self, clock: Clock, *used: Spent, failures: int = 0) -> None:
        self._clock, self._used, self._failures = clock, used, failures
        self.began: list[float] = []

    async def __call__(self, item: int) -> Spent:
        self.began.append(self._clock.now)
        number = len(self.began)
        await asyncio.sleep(0.5)
        if number <= self._failures:
            raise RolloutFailure(FailureKind.SERVER_ERROR, "no")
        return self._used[min(number, len(self._used)) - 1]

    def most_in_a_minute(self) -> int:
        return max(sum(start <= time < start + 60 for time in self.began) for start in self.began)


def run(
    clock: Clock,
    server: Callable[[int], Awaitable[Any]],
    count: int,
    *,
    concurrency: int | Concurrency = 128,
    first_wait_s: float = 0.0,
    **limits: float | None,
) -> int:
    """Run so many items in a loop that moves the clock on instead of waiting; returns how many were done."""
    budget = Budget(limits.get("requests"), limits.get("tokens"), lambda used: used) if limits else None

    class Hurry(selectors.DefaultSelector):
        def select(self, timeout: float | None = None) -> Any:
            clock.now += timeout or 0.0
            return super().select(0)

    class Loop(asyncio.SelectorEventLoop):
        def time(self) -> float:
            return clock.now

    async def play() -> int:
        retry = RetrySettings(first_wait_s=first_wait_s)
        running = run_all(range(count), server, concurrency=concurrency, budget=budget, retry=retry)
        return sum([isinstance(event, Done) async for event in running])

    with asyncio.Runner(loop_factory=lambda: Loop(Hurry())) as runner:
        return runner.run(play())


class Busy:
    """A server that takes so many at a time and refuses the others at once, and some at random."""

    def __init__(self, room: int, refuses: float = 0.0) -> None:
        self._room, self._refuses, self._chance = room, refuses, random.Random(1)
        self.now = self.asked = self.refused = 0

    async def __call__(self, item: int) -> None:
        self.asked += 1
        if self.now >= self._room or self._chance.random() < self._refuses:
            self.refused += 1
            await asyncio.sleep(0.002)
            raise RolloutFailure(FailureKind.RATE_LIMIT, "no", status=429)
        self.now += 1
        await asyncio.sleep(0.1 * self._chance.uniform(0.5, 1.5))
        self.now -= 1


@pytest.mark.parametrize("refuses", [0.0, 0.02])
def test_an_overloaded_server_is_given_nearly_what_it_takes_without_a_storm(
    refuses: float, clock: Clock
) -> None:
    server, most = Busy(50, refuses), Concurrency(64, adaptive=True)
    began = clock.now
    assert run(clock, server, 10_000, concurrency=most, first_wait_s=0.5) == 10_000
    assert 10_000 * 0.1 / (clock.now - began) > 0.8 * 50  # at a time, on the average
    assert server.refused < (refuses + 0.05) * server.asked


@pytest.mark.parametrize(("refuses", "of_the_rate"), [(0.01, 0.9), (0.03, 0.85)])
def test_errors_at_random_cost_little_of_the_rate(refuses: float, of_the_rate: float, clock: Clock) -> None:
    server, most = Busy(1000, refuses), Concurrency(64, adaptive=True)
    began = clock.now
    assert run(clock, server, 10_000, concurrency=most, first_wait_s=0.5) == 10_000
    assert 10_000 * 0.1 / (clock.now - began) > of_the_rate * 64


@pytest.mark.parametrize(("tokens", "most"), [(1500, 20), (10, 60)])
def test_no_minute_has_more_tokens_or_requests_than_its_limit(tokens: int, most: int, clock: Clock) -> None:
    server = Server(clock, Spent(1, tokens))
    assert run(clock, server, 128, requests=60, tokens=30_000) == 128
    assert most - 1 <= server.most_in_a_minute() <= most + 1


def test_later_turns_do_not_wait_but_are_paid_for(clock: Clock) -> None:
    server = Server(clock, Spent(8, 0))
    before = clock.now
    assert run(clock, server, 40, requests=60) == 40
    assert clock.now - before == pytest.approx(40 * 8, rel=0.1)


def test_starts_learn_from_what_ended_meanwhile(clock: Clock) -> None:
    server = Server(clock, Spent(1, 100), Spent(1, 3000))
    assert run(clock, server, 40, tokens=30_000) == 40
    not_to_be_known = sum(time <= server.began[1] + 0.5 for time in server.began)
    assert not_to_be_known < 12
    assert server.most_in_a_minute() * 3000 <= 30_000 + not_to_be_known * 3000


def test_a_limit_of_tokens_lets_one_at_a_time_go_until_the_first_has_ended(clock: Clock) -> None:
    server = Server(clock, Spent(1, 100), failures=2)
    assert run(clock, server, 20, tokens=6e6) == 20
    first, second, third, fourth, *_ = server.began
    assert (second - first, third - second, fourth - third) == pytest.approx((0.5, 0.5, 0.5))
    assert server.began[3:22] == pytest.approx([fourth] * 19)
    server = Server(clock, Spent(1, 100))
    run(clock, server, 10, requests=60_000)
    assert len(set(server.began)) == 1  # of requests everybody knows how many they are


def test_what_a_server_refused_costs_no_tokens(clock: Clock) -> None:
    budget = Budget(None, 6000, lambda used: used)
    budget.end(budget.start(), Spent(1, 600))
    for _ in range(5):
        budget.end(budget.start(), failed=Episode([]))
    clock.now += 6
    assert budget.wait() == 0.0


def test_a_run_does_not_wait_for_a_budget_that_nobody_needs(clock: Clock) -> None:
    before = clock.now
    assert run(clock, Server(clock, Spent()), 1, requests=1) == 1
    assert clock.now - before < 1


@pytest.mark.parametrize("sampled", [{}, {"token_ids": [1] * 50}, {"logprobs": [-0.5] * 50}])
def test_where_the_server_does_not_count_the_length_of_what_was_said_does(sampled: dict[str, Any]) -> None:
    said = {"role": "assistant", "content": "word " * 40}  # two hundred characters
    asked = {"role": "user", "content": "ask " * 50}
    turn = Turn(messages=[said, asked], **sampled)
    assert spent_on_episode(Episode([asked], turns=[turn])) == Spent(1, 100)
    counted = Turn(messages=[said], usage=Usage(7, 3))
    assert spent_on_episode(Episode([asked], turns=[turn, counted])) == Spent(2, 110)
    assert spent_on_episode(Episode([asked], turns=[counted, counted])) == Spent(2, 20)
