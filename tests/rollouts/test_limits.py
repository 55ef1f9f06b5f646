"""How much may be under way, when to try again, and when to give up."""

from __future__ import annotations

import asyncio
import math
import random
import selectors
from collections.abc import Coroutine
from typing import Any

import pytest

from rollbook.records.turns import Usage
from rollbook.rollouts import limits
from rollbook.rollouts.limits import Bucket, Concurrency, NotSent, ThrottledPolicy
from rollbook.rollouts.retry import Attempts, RetrySettings
from rollbook.rollouts.types import Completion, FailureKind, Request, RolloutFailure


class Clock:
    """Time that passes when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(limits, "time", made)
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


def test_concurrency_halves_once_for_what_was_already_under_way(clock: Clock) -> None:
    concurrency = Concurrency(64, adaptive=True)
    for _ in range(10):  # ten that began before anybody knew
        concurrency.failed(FailureKind.RATE_LIMIT, started=clock.now - 1)
    assert concurrency.limit == 32
    clock.now += 1
    concurrency.failed(FailureKind.SERVER_ERROR, started=clock.now - 0.5)
    assert concurrency.limit == 16
    for _ in range(20):
        clock.now += 1
        concurrency.failed(FailureKind.TIMEOUT, started=clock.now - 0.5)
    assert concurrency.limit == 1


def test_concurrency_grows_by_one_a_round_and_not_past_its_most(clock: Clock) -> None:
    concurrency = Concurrency(8, adaptive=True)
    concurrency.failed(FailureKind.RATE_LIMIT, started=clock.now)
    assert concurrency.limit == 4
    for _ in range(5):
        concurrency.succeeded()
    assert concurrency.limit == 5
    for _ in range(100):
        concurrency.succeeded()
    assert concurrency.limit == 8


@pytest.mark.parametrize(
    "kind", [FailureKind.ENVIRONMENT, FailureKind.INVALID_REQUEST, FailureKind.BAD_ANSWER]
)
def test_failures_that_are_no_push_back_slow_nothing_down(kind: FailureKind, clock: Clock) -> None:
    concurrency = Concurrency(8, adaptive=True)
    concurrency.failed(kind, started=clock.now)
    assert concurrency.limit == 8


def test_concurrency_that_is_not_adaptive_stays(clock: Clock) -> None:
    concurrency = Concurrency(8, adaptive=False)
    concurrency.failed(FailureKind.RATE_LIMIT, started=clock.now)
    assert concurrency.limit == 8


def test_a_bucket_gives_so_many_a_minute(clock: Clock) -> None:
    bucket = Bucket(600)  # ten a second
    assert [bucket.take(1) for _ in range(10)] == [0.0] * 10
    assert bucket.take(1) == pytest.approx(0.1)
    assert bucket.take(1) == pytest.approx(0.2)
    clock.now += 60
    assert [bucket.take(1) for _ in range(10)] == [0.0] * 10  # a minute's rest is no minute's burst
    assert bucket.take(1) == pytest.approx(0.1)


def test_a_bucket_of_less_than_one_a_second_still_gives_one_at_once(clock: Clock) -> None:
    bucket = Bucket(6)
    assert bucket.take(1) == 0.0
    assert bucket.take(1) == pytest.approx(10.0)


class Model:
    async def act(self, request: Request) -> Completion:
        return Completion(message={}, usage=Usage(input_tokens=60, output_tokens=40))

    async def close(self) -> None:
        return None


def test_a_policy_keeps_to_requests_and_tokens_a_minute(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def sleep(seconds: float) -> None:
        clock.now += seconds

    monkeypatch.setattr(limits.asyncio, "sleep", sleep)

    async def ask(policy: ThrottledPolicy, times: int) -> float:
        before = clock.now
        for _ in range(times):
            await policy.act(Request((), turn=1))
        return clock.now - before

    by_requests = ThrottledPolicy(Model(), requests_per_minute=60, tokens_per_minute=None)
    assert asyncio.run(ask(by_requests, 31)) == pytest.approx(30, abs=1.1)
    by_tokens = ThrottledPolicy(Model(), requests_per_minute=6_000, tokens_per_minute=6_000)  # one a second
    assert asyncio.run(ask(by_tokens, 31)) == pytest.approx(30, abs=2.1)


class UncountedModel(Model):
    def __init__(self, **sampled: Any) -> None:
        self._sampled = sampled

    async def act(self, request: Request) -> Completion:
        return Completion(message={"content": "word " * 40}, **self._sampled)  # two hundred characters


@pytest.mark.parametrize("sampled", [{}, {"token_ids": [1] * 50}, {"logprobs": [-0.5] * 50}])
def test_tokens_a_minute_are_kept_to_where_the_server_does_not_count(
    sampled: dict[str, Any], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def sleep(seconds: float) -> None:
        clock.now += seconds

    monkeypatch.setattr(limits.asyncio, "sleep", sleep)

    async def ask(policy: ThrottledPolicy, times: int) -> None:
        for _ in range(times):
            await policy.act(Request(({"role": "user", "content": "ask " * 50},), turn=1))

    before = clock.now
    policy = ThrottledPolicy(UncountedModel(**sampled), requests_per_minute=None, tokens_per_minute=6_000)
    asyncio.run(ask(policy, 31))  # of a hundred tokens, one a second
    assert clock.now - before == pytest.approx(30, abs=2.1)


def test_a_drain_does_not_wait_for_requests_whose_turn_has_not_come() -> None:
    async def play() -> list[str]:
        draining = asyncio.Event()
        policy = ThrottledPolicy(Model(), 1 / 60, None, draining)  # the second request: in an hour
        await policy.act(Request(()))
        few_shot = [{"role": "assistant", "content": "as in this example"}]
        waiting = asyncio.ensure_future(policy.act(Request(few_shot)))
        under_way = asyncio.ensure_future(policy.act(Request((), turn=1)))
        await asyncio.sleep(0.01)
        draining.set()
        await asyncio.wait([waiting, under_way], timeout=0.05)
        states = [type(waiting.exception()).__name__, str(under_way.done())]
        under_way.cancel()
        return states

    assert asyncio.run(play()) == ["NotSent", "False"]


class SlowModel(Model):
    """Answers when told, or half a second later; the n-th answer uses the n-th size, or the last."""

    def __init__(self, *sizes: int, clock: Clock | None = None) -> None:
        self._sizes, self._clock = sizes, clock
        self.sent: list[tuple[float, Request]] = []
        self.answers: list[asyncio.Future[None]] = []

    async def act(self, request: Request) -> Completion:
        size = self._sizes[min(len(self.sent), len(self._sizes) - 1)]
        self.sent.append((self._clock.now if self._clock else 0.0, request))
        if self._clock:
            await asyncio.sleep(0.5)
        else:
            self.answers.append(asyncio.get_running_loop().create_future())
            await self.answers[-1]
        return Completion(message={}, usage=Usage(input_tokens=size))


def without_waiting(clock: Clock, play: Coroutine[Any, Any, None]) -> None:
    """Run it in a loop that moves the clock on instead of waiting."""

    class Hurry(selectors.DefaultSelector):
        def select(self, timeout: float | None = None) -> Any:
            clock.now += timeout or 0.0
            return super().select(0)

    class Loop(asyncio.SelectorEventLoop):
        def time(self) -> float:
            return clock.now

    with asyncio.Runner(loop_factory=lambda: Loop(Hurry())) as runner:
        runner.run(play)


async def turns_of_the_loop() -> None:
    for _ in range(200):
        await asyncio.sleep(0)


def start_all(policy: ThrottledPolicy, requests: list[Request]) -> list[asyncio.Future[Completion]]:
    return [asyncio.ensure_future(policy.act(request)) for request in requests]


def most_in_a_minute(times: list[float]) -> int:
    return max(sum(start <= time < start + 60 for time in times) for start in times)


@pytest.mark.parametrize("turn", [0, 1])
def test_no_minute_has_more_tokens_or_requests_than_its_limit(turn: int, clock: Clock) -> None:
    async def play(model: SlowModel, requests_per_minute: float | None) -> None:
        policy = ThrottledPolicy(model, requests_per_minute, tokens_per_minute=30_000)
        requests = [Request(({"role": "user", "content": str(n)},), turn=turn) for n in range(128)]
        await asyncio.gather(*start_all(policy, requests))
        assert [request for _, request in model.sent] == requests  # in the order of arrival

    large, small = SlowModel(1500, clock=clock), SlowModel(10, clock=clock)
    without_waiting(clock, play(large, 60))
    assert 19 <= most_in_a_minute([time for time, _ in large.sent]) <= 21
    without_waiting(clock, play(small, 60))
    assert 59 <= most_in_a_minute([time for time, _ in small.sent]) <= 61


def test_those_who_wait_learn_from_the_answers_meanwhile(clock: Clock) -> None:
    model = SlowModel(100, 3000, clock=clock)

    async def play() -> None:
        policy = ThrottledPolicy(model, None, tokens_per_minute=30_000)
        await asyncio.gather(*start_all(policy, [Request(())] * 40))

    without_waiting(clock, play())
    times = [time for time, _ in model.sent]
    not_to_be_known = sum(time <= times[1] + 0.5 for time in times)
    assert not_to_be_known < 12
    assert most_in_a_minute(times) * 3000 <= 30_000 + not_to_be_known * 3000


def test_until_the_first_answer_one_request_of_unknown_size_is_under_way() -> None:
    async def play() -> None:
        model = SlowModel(100)
        tasks = start_all(ThrottledPolicy(model, None, tokens_per_minute=6e6), [Request(())] * 20)
        await turns_of_the_loop()
        assert len(model.sent) == 1
        model.answers[0].set_exception(RolloutFailure(FailureKind.SERVER_ERROR, "no"))
        await turns_of_the_loop()
        assert len(model.sent) == 2  # the first told nothing: the next one goes
        tasks[1].cancel()
        tasks[2].cancel()
        await turns_of_the_loop()
        assert len(model.sent) == 3
        model.answers[2].set_result(None)
        await turns_of_the_loop()
        assert len(model.sent) == 19

    asyncio.run(play())


@pytest.mark.parametrize("name", ["max_output_tokens", "max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("of_the_policy", [False, True])
def test_requests_that_name_the_most_of_an_answer_need_not_wait_for_one(
    name: str, of_the_policy: bool
) -> None:
    async def play() -> None:
        model, most = SlowModel(100), {name: 100}
        params = most if of_the_policy else None
        policy = ThrottledPolicy(model, None, tokens_per_minute=6e4, params=params)  # a thousand a second
        row: dict[str, int | None] = {name: None} if of_the_policy else {**most}
        start_all(policy, [Request((), params=row)] * 20)
        await turns_of_the_loop()
        assert len(model.sent) == 10

    asyncio.run(play())


def test_without_a_limit_of_tokens_nobody_waits_for_a_first_answer() -> None:
    async def play() -> None:
        model = SlowModel(100)
        start_all(ThrottledPolicy(model, 6000, None), [Request(())] * 20)
        await turns_of_the_loop()
        assert len(model.sent) == 20

    asyncio.run(play())


def test_a_drain_lets_go_of_those_who_wait_for_the_first_answer() -> None:
    async def play() -> None:
        model, draining = SlowModel(100), asyncio.Event()
        policy = ThrottledPolicy(model, None, 6e6, draining)
        first, *waiting, under_way = start_all(policy, [Request(())] * 20 + [Request((), turn=1)])
        await turns_of_the_loop()
        draining.set()
        await turns_of_the_loop()
        assert {type(task.exception()) for task in waiting} == {NotSent}
        model.answers[0].set_result(None)
        await first
        await turns_of_the_loop()
        model.answers[1].set_result(None)
        await under_way

    asyncio.run(play())


def test_a_drain_lets_go_of_those_behind_an_episode_that_may_finish() -> None:
    async def play() -> None:
        draining = asyncio.Event()
        policy = ThrottledPolicy(Model(), 1 / 60, None, draining)  # the second request: in an hour
        _, under_way, behind = start_all(policy, [Request(()), Request((), turn=1), Request(())])
        await turns_of_the_loop()
        draining.set()
        await turns_of_the_loop()
        assert isinstance(behind.exception(), NotSent)
        assert not under_way.done()

    asyncio.run(play())
