"""A model as a judge: its verdicts, its silence, and its failures, over a real endpoint."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from env_helpers import question
from fake_servers import Handler, Told, chat_answer, serving, serving_bytes
from rollbook.envs.agents import EnvironmentAgent, build_agent
from rollbook.envs.base import Environment
from rollbook.envs.judge import Judge, JudgeSettings
from rollbook.envs.source import open_environment
from rollbook.errors import UsageError
from rollbook.policies.scripted import ScriptedPolicy
from rollbook.rollouts.types import Episode, FailureKind, Feedback, Message, RolloutFailure


async def _judged(url: str, answer: str, **judge: Any) -> Episode:
    env = {"name": "dataset", "grader": "judge", "judge": {"base_url": url, "model": "j", **judge}}
    agent = build_agent(env, {"kind": "scripted", "script": [answer]})
    try:
        return await agent.run(question("Paris"))
    finally:
        await agent.close()


def judged(handler: Handler, answer: str = "It is Paris", **judge: Any) -> Episode:
    async def play() -> Episode:
        async with serving(handler) as url:
            return await _judged(url, answer, **judge)

    return asyncio.run(play())


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ("Same city. VERDICT: CORRECT", 1),
        ("VERDICT: INCORRECT", 0),
        ("**Verdict:** **correct**.", 1),
        ("VERDICT: 'INCORRECT'", 0),
        ("VERDICT: CORRECT ... on second thought\nVERDICT: INCORRECT", 0),
    ],
)
def test_the_last_verdict_counts(said: str, reward: int) -> None:
    episode = judged(Told(chat_answer(said)), verdict_after="VERDICT:")
    assert episode.reward == reward
    step = episode.turns[0]
    assert step.metrics["correct"] == reward
    assert step.logs == {"judge": said}


@pytest.mark.parametrize("said", [" ", "It is correct, I think.", "VERDICT: PERHAPS", "VERDICT: CORRECTISH"])
def test_a_reply_without_a_verdict_is_the_judges_failure_not_a_zero(said: str) -> None:
    with pytest.raises(RolloutFailure) as caught:
        judged(Told(chat_answer(said)))
    assert caught.value.kind is FailureKind.JUDGE
    assert repr(said) in str(caught.value)
    assert "'VERDICT:' and then one of CORRECT, INCORRECT" in str(caught.value)


def test_of_a_long_reply_without_a_verdict_the_beginning_is_shown() -> None:
    with pytest.raises(RolloutFailure, match="Let me think, think") as caught:
        judged(Told(chat_answer("Let me think," + " think" * 10_000)))
    assert len(str(caught.value)) < 500


def test_verdicts_and_prompt_can_be_ones_own() -> None:
    server = Told(chat_answer("Grade: B"))
    episode = judged(
        server,
        "two {expected} braces {x}",
        prompt="Q {question} R {expected} A {answer} {other}",
        verdicts={"A": 1.0, "B": 0.5},
        verdict_after="Grade:",
        params={"temperature": 0},
    )
    assert episode.reward == 0.5
    (asked,) = server.asked
    assert asked["model"] == "j"
    assert asked["temperature"] == 0
    # What the answer says in braces is not filled in, and shows the judge nothing else.
    assert asked["messages"][0]["content"] == "Q What? R Paris A two {expected} braces {x} {other}"


def test_the_judges_tokens_are_counted_apart() -> None:
    answer = chat_answer("VERDICT: CORRECT") | {"usage": {"prompt_tokens": 11, "completion_tokens": 3}}
    metrics = judged(Told(answer)).turns[0].metrics
    assert (metrics["judge_input_tokens"], metrics["judge_output_tokens"]) == (11, 3)


@pytest.mark.parametrize(
    ("handler", "status", "retry_after"),
    [
        (Told({}, status=429, headers={"Retry-After": "2"}), 429, 2.0),
        (Told({}, status=500), 500, None),
        (Told(b"garbage"), None, None),
    ],
    ids=["429", "500", "garbage"],
)
def test_a_call_that_failed_is_the_judges_failure(
    handler: Told, status: int | None, retry_after: float | None
) -> None:
    with pytest.raises(RolloutFailure) as caught:
        judged(handler)
    failure = caught.value
    assert (failure.kind, failure.status, failure.retry_after) == (FailureKind.JUDGE, status, retry_after)


def test_a_judge_that_hangs_is_the_judges_failure() -> None:
    async def play() -> None:
        async with serving_bytes(None) as url:
            await _judged(url, "Paris", total_timeout_s=0.3)

    with pytest.raises(RolloutFailure) as caught:
        asyncio.run(play())
    assert caught.value.kind is FailureKind.JUDGE
    assert "timeout" in str(caught.value)


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(UsageError, match=r"\{answer\}"):
        Judge(JudgeSettings(base_url="http://h/v1", model="m", prompt="{question}"))
    with pytest.raises(UsageError, match="verdicts"):
        Judge(JudgeSettings(base_url="http://h/v1", model="m", verdicts={}))
    with pytest.raises(UsageError, match=r"env\.judge\.base_url"):
        Judge(JudgeSettings(base_url="h", model="m"))


def test_all_episodes_share_one_judge() -> None:
    server = Told(chat_answer("VERDICT: CORRECT"))

    async def play() -> list[float]:
        async with serving(server) as url:
            env = {"name": "dataset", "grader": "judge", "judge": {"base_url": url, "model": "j"}}
            agent = build_agent(env, {"kind": "scripted", "script": ["Paris"]})
            tasks = [question("Paris") for _ in range(50)]
            episodes = await asyncio.gather(*map(agent.run, tasks))
            make = agent._source.make  # type: ignore[attr-defined]
            assert make()._grader is make()._grader
            await agent.close()
            return [episode.reward for episode in episodes]

    assert asyncio.run(play()) == [1.0] * 50


class Wavering(Environment):
    """Opens anew every time, so that a reply belongs to one opening alone."""

    def step(self, message: Message) -> Feedback:
        raise RolloutFailure(FailureKind.JUDGE, "no verdict")


class Steady(Wavering):
    stateless = True


def test_a_reply_is_kept_for_the_judge_only_where_grading_depends_on_nothing_else() -> None:
    for kind, is_kept in ((Wavering, False), (Steady, True)):
        with pytest.raises(RolloutFailure) as caught:
            asyncio.run(
                EnvironmentAgent(open_environment(kind), ScriptedPolicy(["hm"])).run(question("Paris"))
            )
        assert (caught.value.reply is not None) == is_kept
