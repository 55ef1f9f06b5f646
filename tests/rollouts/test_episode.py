"""The one loop of an environment and a policy, above all when one of them breaks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from rollbook.records.identity import derive_seed
from rollbook.records.turns import Usage, token_rows
from rollbook.rollouts.episode import play
from rollbook.rollouts.failures import PolicyGone
from rollbook.rollouts.types import (
    Completion,
    Episode,
    FailureKind,
    Feedback,
    Message,
    Opening,
    OutOfTokens,
    Request,
    RolloutFailure,
    Task,
)

Method = Callable[..., Any]


class Counting:
    """Goes on until the third reply; every method is async."""

    def __init__(self, turns: int = 3) -> None:
        self.turns, self.closed, self._turn = turns, 0, 0

    async def start(self, task: Task) -> Opening:
        return Opening(messages=[*task.messages, {"role": "user", "content": "count"}])

    async def step(self, message: Message) -> Feedback:
        self._turn += 1
        return Feedback(
            reward=0.5,
            done=self._turn == self.turns,
            messages=[{"role": "user", "content": f"turn {self._turn}"}],
            metrics={"turn": self._turn},
            stop_reason="counted",
        )

    async def close(self) -> None:
        self.closed += 1


class Policy:
    def __init__(self, act: Callable[[Request], Any]) -> None:
        self._act = act
        self.requests: list[Request] = []

    async def act(self, request: Request) -> Completion:
        self.requests.append(request)
        reply = self._act(request)
        if isinstance(reply, Completion):
            return reply
        return Completion(message={"role": "assistant", "content": reply})

    async def close(self) -> None:
        return None


def _task(**fields: Any) -> Task:
    return Task(id="t", row={}, messages=[{"role": "user", "content": "What?"}], **fields)


def _play(environment: Any, policy: Policy | None = None, **settings: Any) -> Episode:
    task = settings.pop("task", None) or _task()
    return asyncio.run(play(environment, policy or Policy(lambda request: "tick"), task, **settings))


def _failure(environment: Any, policy: Policy | None = None, **settings: Any) -> RolloutFailure:
    with pytest.raises(RolloutFailure) as raised:
        _play(environment, policy, **settings)
    return raised.value


def _broken(**methods: Method) -> Any:
    defaults: dict[str, Any] = {
        "start": lambda self, task: Opening(task.messages),
        "step": lambda self, message: Feedback(reward=1.0),
        "close": lambda self: None,
    }
    return type("Broken", (), defaults | methods)()


def test_turns_own_their_messages_rewards_and_metrics() -> None:
    environment = Counting()
    episode = _play(environment)
    assert episode.reward == 1.5
    assert [turn.metrics["turn"] for turn in episode.turns] == [1, 2, 3]
    assert [turn.reply["content"] for turn in episode.turns] == ["tick"] * 3
    assert [turn.messages[1]["content"] for turn in episode.turns] == ["turn 1", "turn 2", "turn 3"]
    assert (episode.stop_reason, len(episode.prompt), environment.closed) == ("counted", 2, 1)


def test_a_request_that_is_kept_does_not_change() -> None:
    policy = Policy(lambda request: "tick")
    _play(Counting(), policy)
    assert [len(request.messages) for request in policy.requests] == [2, 4, 6]
    assert [len(request.turns) for request in policy.requests] == [0, 1, 2]
    assert all(isinstance(request.messages, tuple) for request in policy.requests)


def test_seeds_follow_from_the_task_and_the_turn() -> None:
    policy = Policy(lambda request: "tick")
    _play(Counting(2), policy, task=_task(seed=7))
    assert [request.seed for request in policy.requests] == [derive_seed(7, 0), derive_seed(7, 1)]
    assert derive_seed(7, 0) != derive_seed(7, 1) != derive_seed(70, 1)
    assert 0 <= derive_seed("a", 1) < 2**63
    unseeded = Policy(lambda request: "tick")
    _play(Counting(1), unseeded)
    assert unseeded.requests[0].seed is None


def test_max_turns_ends_an_endless_episode() -> None:
    episode = _play(Counting(), max_turns=2)
    assert (episode.stop_reason, episode.reward, len(episode.turns)) == ("max_turns", 1.0, 2)


def test_a_conversation_that_grows_too_long_ends_the_episode_by_its_length() -> None:
    """It is cut, with the rewards until then, and no failure."""

    def act(request: Request) -> str:
        if request.turn == 2:
            raise OutOfTokens("the prompt has 513 tokens, and 512 fit")
        return "tick"

    environment = Counting(turns=5)
    episode = _play(environment, Policy(act))
    assert (episode.stop_reason, len(episode.turns), episode.reward) == ("max_length", 2, 1.0)
    assert environment.closed == 1


def test_a_first_prompt_that_is_too_long_is_a_failure() -> None:
    def act(request: Request) -> str:
        raise OutOfTokens("the prompt has 513 tokens, and 512 fit")

    failure = _failure(Counting(), Policy(act))
    assert (failure.kind, str(failure)) == (
        FailureKind.INVALID_REQUEST,
        "the prompt has 513 tokens, and 512 fit",
    )


def test_a_policy_that_is_gone_is_no_failure_of_a_rollout() -> None:
    def act(request: Request) -> str:
        raise PolicyGone("the model ran out of memory")

    environment = Counting()
    with pytest.raises(PolicyGone, match="out of memory"):
        _play(environment, Policy(act))
    assert environment.closed == 1


def test_a_turn_keeps_the_tokens_that_are_new() -> None:
    prompts, samples = [[1, 2], [1, 2, 3, 9, 4], [7, 7, 3]], [[3, 9], [5], [6]]

    def act(request: Request) -> Completion:
        return Completion(
            message={"role": "assistant", "content": "x"},
            prompt_token_ids=prompts[request.turn],
            token_ids=samples[request.turn],
            logprobs=[-0.5] * len(samples[request.turn]),
            policy_version=4,
            temperature=1.0,
            seed=request.seed,
        )

    episode = _play(Counting(), Policy(act))
    assert [turn.prompt_token_ids for turn in episode.turns] == [[1, 2], [4], [7, 7, 3]]
    assert [turn.new_row for turn in episode.turns[:2]] == [None, None]
    assert episode.turns[2].new_row == "the prompt differs from the tokens of the turns before at token 0"
    assert [row.token_ids for row in token_rows(episode.turns)] == [[1, 2, 3, 9, 4, 5], [7, 7, 3, 6]]
    assert {(turn.policy_version, turn.temperature) for turn in episode.turns} == {(4, 1.0)}


def test_a_row_begins_anew_where_the_policy_says_so_or_a_turn_had_no_tokens() -> None:
    replies = [
        Completion(message={"role": "assistant", "content": "a"}, prompt_token_ids=[1], token_ids=[2]),
        Completion(message={"role": "assistant", "content": "b"}),
        Completion(message={"role": "assistant", "content": "c"}, prompt_token_ids=[1, 2, 3], token_ids=[4]),
        Completion(
            message={"role": "assistant", "content": "d"},
            prompt_token_ids=[1, 2, 3, 4, 5],
            token_ids=[6],
            new_row="reasoning was dropped",
        ),
    ]
    turns = _play(Counting(4), Policy(lambda request: replies[request.turn])).turns
    assert [turn.prompt_token_ids for turn in turns] == [[1], None, [1, 2, 3], [1, 2, 3, 4, 5]]
    assert [turn.new_row for turn in turns] == [
        None,
        None,
        "the turn before has no token ids",
        "reasoning was dropped",
    ]


def test_metrics_of_the_policy_join_those_of_the_turn() -> None:
    reply = Completion(message={"role": "assistant", "content": "x"}, metrics={"format/tool_error": 1})
    assert _play(Counting(1), Policy(lambda request: reply)).turns[0].metrics == {
        "format/tool_error": 1,
        "turn": 1,
    }


def test_usage_is_unknown_where_one_turn_was_not_counted() -> None:
    counted = Completion(message={"role": "assistant", "content": "x"}, usage=Usage(3, 2))
    uncounted = Completion(message={"role": "assistant", "content": "x"})
    assert _play(Counting(2), Policy(lambda request: counted)).usage == Usage(6, 4)
    mixed = _play(Counting(2), Policy(lambda request: (counted, uncounted)[request.turn]))
    assert mixed.usage is None
    assert [turn.usage for turn in mixed.turns] == [Usage(3, 2), None]


def _raise(*arguments: Any) -> Any:
    raise ValueError("broken here")


async def _raise_later(*arguments: Any) -> Any:
    raise ValueError("broken here")


class Panic(BaseException):
    """As code in Rust raises it."""


def _panic(*arguments: Any) -> Any:
    raise Panic("broken here")


async def _leak(*arguments: Any) -> Any:
    raise asyncio.CancelledError("broken here")


class _Wordless(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def _raise_wordless(*arguments: Any) -> Any:
    raise _Wordless


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ({"start": _raise}, r"Broken\._raise: ValueError: broken here \(.*test_episode\.py:\d+\)"),
        ({"step": _raise}, r"Broken\._raise: ValueError: broken here \(.*test_episode\.py:\d+\)"),
        ({"step": _raise_later}, "broken here"),
        ({"start": _panic}, "Panic: broken here"),
        ({"step": _panic}, "Panic: broken here"),
        ({"step": _leak}, "CancelledError: broken here"),
        ({"step": _raise_wordless}, "_Wordless: its text failed with ValueError"),
        ({"start": lambda self, task: None}, "must return an Opening, not NoneType"),
        (
            {"step": lambda self, message: Feedback(messages=None)},
            "gave the messages None; they must be a list",
        ),
        (
            {"step": lambda self, message: Feedback(messages=["go on"])},
            r"gave the messages \['go on'\]; they",
        ),
        ({"step": lambda self, message: Feedback(messages={"role": "user"})}, "gave the messages {'role'"),
        ({"start": lambda self, task: Opening(messages="begin")}, "gave the messages 'begin'; they must be"),
        ({"step": lambda self, message: 1.0}, "must return a Feedback, not float"),
        ({"step": lambda self, message: Feedback(reward=float("nan"))}, "the reward nan"),
        ({"step": lambda self, message: Feedback(reward=None)}, "the reward None"),
        ({"step": lambda self, message: Feedback(reward=1.5e308, done=False)}, "the reward inf"),
    ],
)
def test_an_environment_that_breaks_is_a_failure_of_the_environment(
    methods: dict[str, Method], message: str
) -> None:
    failure = _failure(_broken(**methods))
    assert failure.kind is FailureKind.ENVIRONMENT
    with pytest.raises(RolloutFailure, match=message):
        raise failure


def test_an_error_of_a_policy_names_its_place() -> None:
    failure = _failure(Counting(), Policy(_raise))
    assert failure.kind is FailureKind.ENVIRONMENT
    assert str(failure).startswith("Policy.act: ValueError: broken here (")


def test_a_failure_carries_the_turns_until_then_and_closes_the_environment() -> None:
    def act(request: Request) -> str:
        if request.turn == 2:
            raise RolloutFailure(FailureKind.RATE_LIMIT, "later")
        return "tick"

    environment = Counting()
    failure = _failure(environment, Policy(act))
    assert failure.kind is FailureKind.RATE_LIMIT
    assert failure.episode is not None
    assert (len(failure.episode.turns), environment.closed) == (2, 1)


def test_the_reply_that_could_not_be_graded_is_in_the_failures_episode() -> None:
    failure = _failure(_broken(step=_raise))
    assert failure.episode is not None
    assert [turn.reward for turn in failure.episode.turns] == [None]
    assert failure.episode.reward is None


@pytest.mark.parametrize(("stateless", "is_kept"), [(True, True), (False, False)])
def test_a_reply_that_a_judge_could_not_grade_is_kept_for_the_next_attempt(
    stateless: bool, is_kept: bool
) -> None:
    def step(self: Any, message: Message) -> Feedback:
        raise RolloutFailure(FailureKind.JUDGE, "the judge is down")

    environment = _broken(step=step)
    environment.stateless = stateless
    failure = _failure(environment)
    assert (failure.reply is not None) is is_kept
    policy = Policy(_raise)
    again = _task(reply=Completion(message={"role": "assistant", "content": "kept"}))
    assert _play(_broken(), policy, task=again).turns[0].reply["content"] == "kept"
    assert policy.requests == []


async def _wait_for_ever(*arguments: Any) -> Any:
    await asyncio.Event().wait()


async def _make_another_error_of_it(*arguments: Any) -> Any:
    try:
        await asyncio.Event().wait()
    except BaseException as error:
        raise ValueError("interrupted") from error


@pytest.mark.parametrize("limit", ["timeout_s", "call_timeout_s"])
@pytest.mark.parametrize("waits", [_wait_for_ever, _make_another_error_of_it])
@pytest.mark.parametrize("method", ["start", "step"])
def test_an_episode_that_takes_too_long_is_a_timeout(limit: str, waits: Method, method: str) -> None:
    failure = _failure(_broken(**{method: waits}), **{limit: 0.01})
    assert failure.kind is FailureKind.TIMEOUT
    assert f"Broken.{waits.__name__}" in str(failure)
    assert "took longer than 0.01 s" in str(failure)
    if method == "step":
        assert failure.episode is not None
        assert len(failure.episode.turns) == 1


@pytest.mark.parametrize("limit", ["timeout_s", "call_timeout_s"])
def test_a_policy_that_takes_too_long_is_a_timeout(limit: str) -> None:
    class Slow(Policy):
        async def act(self, request: Request) -> Completion:
            if request.turn == 0:
                return await super().act(request)
            return await _wait_for_ever()  # type: ignore[no-any-return]

    failure = _failure(Counting(), Slow(lambda request: "tick"), **{limit: 0.01})
    assert failure.kind is FailureKind.TIMEOUT and "Slow.act" in str(failure)
    assert failure.episode is not None
    assert [turn.reward for turn in failure.episode.turns] == [0.5]  # of the turn that was played


@pytest.mark.parametrize("method", ["start", "step"])
def test_a_call_that_cannot_be_interrupted_is_a_timeout_once_it_returns(method: str) -> None:
    def sleep(self: Any, *arguments: Any) -> Any:
        time.sleep(0.02)
        return Feedback(reward=1.0) if method == "step" else Opening(messages=[])

    failure = _failure(_broken(**{method: sleep}), call_timeout_s=0.01)
    assert (failure.kind, str(failure)) == (FailureKind.TIMEOUT, "Broken.sleep took longer than 0.01 s")
    assert _play(_broken(**{method: sleep}), call_timeout_s=60).turns


def test_a_time_error_of_the_environments_own_is_its_failure() -> None:
    async def step(self: Any, message: Message) -> Feedback:
        raise TimeoutError("its own")

    assert _failure(_broken(step=step), timeout_s=60).kind is FailureKind.ENVIRONMENT


def test_a_cancel_from_outside_is_no_failure_and_the_environment_is_closed() -> None:
    closed: list[bool] = []

    async def cancelled() -> None:
        waiting = asyncio.Event()

        async def step(self: Any, message: Message) -> Feedback:
            waiting.set()
            await asyncio.Event().wait()
            return Feedback()

        environment = _broken(step=step, close=lambda self: closed.append(True))
        policy = Policy(lambda request: "x")
        task = asyncio.ensure_future(play(environment, policy, _task(), timeout_s=3600))
        await waiting.wait()
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())
    assert closed == [True]


@pytest.mark.parametrize("close", [_raise, _raise_later, _panic])
def test_a_result_is_kept_when_closing_breaks_and_that_is_said_once(
    close: Method, caplog: pytest.LogCaptureFixture
) -> None:
    kind = type(_broken(close=close))
    assert [_play(kind()).reward, _play(kind()).reward] == [1.0, 1.0]
    (said,) = [record for record in caplog.records if record.name == "rollbook"]
    assert said.levelname == "WARNING"
    assert "broken here (" in said.getMessage()
