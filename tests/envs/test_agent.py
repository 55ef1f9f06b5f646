"""The loop of an environment and a policy, above all when one of them breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from env_helpers import failure_of, question, run, run_one
from rollbook.envs import Environment, Feedback, Start, Task, single_turn
from rollbook.envs.agent import EnvironmentAgent
from rollbook.envs.base import SharingFactory
from rollbook.policies.base import FailureKind, Message, Request, RolloutFailure
from rollbook.policies.scripted import ScriptedPolicy


class Countdown(Environment):
    """Goes on until the policy says the number of turns; everything is async."""

    closed = 0

    def __init__(self) -> None:
        self._turn = 0

    async def start(self, task: Task) -> Start:
        return Start(messages=[*task.messages, {"role": "user", "content": "count"}])

    async def step(self, message: Message) -> Feedback:
        self._turn += 1
        more = [{"role": "user", "content": f"turn {self._turn}"}]
        return Feedback(
            reward=0.5,
            done=self._turn == 3,
            messages=more,
            metrics={"turn": self._turn},
            stop_reason="counted",
        )

    async def close(self) -> None:  # type: ignore[override]
        type(self).closed += 1


def test_turns_rewards_and_messages_add_up() -> None:
    seen: list[int] = []

    def script(request: Request) -> str:
        seen.append(len(request.messages))
        return "tick"

    Countdown.closed = 0
    episode = run_one(EnvironmentAgent(Countdown, ScriptedPolicy(script)), question())
    assert episode.reward == 1.5
    assert seen == [2, 4, 6]
    assert [step.metrics["turn"] for step in episode.steps] == [1, 2, 3]
    assert [step.episode_done for step in episode.steps] == [False, False, True]
    assert (episode.stop_reason, len(episode.completions), len(episode.prompt)) == ("counted", 3, 2)
    assert Countdown.closed == 1


def test_the_agents_own_limit_ends_an_endless_episode() -> None:
    episode = run_one(EnvironmentAgent(Countdown, ScriptedPolicy("tick"), max_turns=2), question())
    assert (episode.stop_reason, episode.reward, episode.steps[-1].episode_done) == ("max_turns", 1.0, True)


def _broken(**methods: Callable[..., Any]) -> type[Environment]:
    return type("Broken", (Environment,), methods)


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


def _fine(self: Any, message: Message) -> Feedback:
    return Feedback(reward=1.0)


@pytest.mark.parametrize(
    ("methods", "said"),
    [
        ({"__init__": _raise}, "broken here"),
        ({"start": _raise}, r"Broken\.\w+: ValueError: broken here"),
        ({"step": _raise}, r"Broken\.\w+: ValueError: broken here"),
        ({"step": _raise_later}, "broken here"),
        ({"__init__": _panic}, "Panic: broken here"),
        ({"start": _panic}, "Panic: broken here"),
        ({"step": _panic}, "Panic: broken here"),
        ({"step": _leak}, "CancelledError: broken here"),
        ({"step": _raise_wordless}, "_Wordless: its text failed with ValueError"),
        ({"start": lambda self, task: None, "step": _fine}, "must return a Start, not NoneType"),
        ({"step": lambda self, message: 1.0}, "must return a Feedback, not float"),
        ({"step": lambda self, message: Feedback(reward=float("nan"))}, "the reward nan"),
        ({"step": lambda self, message: Feedback(reward=None)}, "the reward None"),
        ({}, "has no step"),
    ],
)
def test_an_environment_that_breaks_is_a_failure_of_the_environment(methods: Any, said: str) -> None:
    failure = failure_of(EnvironmentAgent(_broken(**methods), ScriptedPolicy("x")), question())
    assert failure.kind is FailureKind.ENVIRONMENT
    with pytest.raises(RolloutFailure, match=said):
        raise failure


def test_the_first_failure_counts_and_the_environment_is_closed() -> None:
    def refuse(request: Request) -> str:
        raise RolloutFailure(FailureKind.RATE_LIMIT, "later")

    closed: list[bool] = []

    def close(self: Any) -> None:
        closed.append(True)
        raise ValueError("closing breaks too")

    failure = failure_of(EnvironmentAgent(_broken(close=close), ScriptedPolicy(refuse)), question())
    assert failure.kind is FailureKind.RATE_LIMIT
    assert closed == [True]


@pytest.mark.parametrize("close", [_raise, _raise_later, _panic])
def test_a_result_is_kept_when_closing_breaks_and_that_is_said_once(
    close: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    agent = EnvironmentAgent(_broken(step=_fine, close=close), ScriptedPolicy("x"))
    assert [episode.reward for episode in run(agent, question(), question())] == [1.0, 1.0]
    (said,) = [record for record in caplog.records if record.name == "rollbook"]
    assert said.levelname == "WARNING"
    assert "broken here (" in said.getMessage()
    assert "test_agent.py:" in said.getMessage()


def test_all_that_is_shared_is_closed_though_one_of_it_breaks(caplog: pytest.LogCaptureFixture) -> None:
    closed: list[bool] = []

    class Resource:
        def __init__(self, close: Callable[[], Any]) -> None:
            self.close = close

    class Sharing(Environment):
        def __init__(self, **shared: Any) -> None:
            pass

        @classmethod
        def shared(cls, **settings: Any) -> dict[str, Any]:
            last = Resource(lambda: closed.append(True))
            return {"table": Resource(_raise), "client": Resource(_raise_later), "last": last}

        step = _fine

    agent = EnvironmentAgent(SharingFactory(Sharing, {}), ScriptedPolicy("x"))
    assert run_one(agent, question()).reward == 1.0
    assert closed == [True]
    said = [record.getMessage() for record in caplog.records if record.name == "rollbook"]
    assert [line.partition(" (")[0] for line in said] == [
        "Sharing: closing 'table': ValueError: broken here",
        "Sharing: closing 'client': ValueError: broken here",
    ]


def test_rewards_that_add_up_to_no_finite_number_are_a_failure() -> None:
    def step(self: Any, message: Message) -> Feedback:
        return Feedback(reward=1.5e308, done=False)

    failure = failure_of(EnvironmentAgent(_broken(step=step), ScriptedPolicy("x"), max_turns=2), question())
    assert failure.kind is FailureKind.ENVIRONMENT
    assert "the reward inf, which is not a finite number" in str(failure)


def test_a_cancel_from_outside_is_no_failure_and_the_environment_is_closed() -> None:
    async def hang(self: Any, message: Message) -> Feedback:
        await asyncio.sleep(3600)
        return Feedback()

    closed: list[bool] = []
    kind = _broken(step=hang, close=lambda self: closed.append(True))

    async def play() -> None:
        task = asyncio.ensure_future(EnvironmentAgent(kind, ScriptedPolicy("x")).run(question()))
        await asyncio.sleep(0.01)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(play())
    assert closed == [True]


def test_three_lines_make_an_environment() -> None:
    @single_turn
    def exact(task: Task, answer: str) -> bool:
        return answer.strip() == task.row["expected_answer"]

    assert run_one(EnvironmentAgent(exact, ScriptedPolicy(" 42 ")), question("42")).reward == 1.0
    assert run_one(EnvironmentAgent(exact, ScriptedPolicy("43")), question("42")).reward == 0.0


def test_a_grading_function_may_return_more_and_be_async() -> None:
    @single_turn
    async def lengthy(task: Task, answer: str) -> dict[str, Any]:
        return {"reward": 0.25, "length": len(answer), "why": "too long"}

    step = run_one(EnvironmentAgent(lengthy, ScriptedPolicy("abc")), question()).steps[0]
    assert (step.reward, step.metrics, step.logs) == (0.25, {"length": 3}, {"why": "too long"})

    @single_turn
    def forgetful(task: Task, answer: str) -> dict[str, Any]:
        return {"score": 1}

    failure = failure_of(EnvironmentAgent(forgetful, ScriptedPolicy("abc")), question())
    assert "no 'reward'" in str(failure)
