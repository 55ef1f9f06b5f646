"""The smallest environment: its tasks are deterministic, its grades are right."""

from __future__ import annotations

import itertools

import pytest

from env_helpers import failure_of, question, run, run_one, task_of
from rollbook.envs.agents import build_agent, make_tasks
from rollbook.envs.arithmetic import Arithmetic
from rollbook.envs.expressions import evaluate
from rollbook.errors import UsageError
from rollbook.rollouts.types import FailureKind, Request


def solve(request: Request) -> str:
    """A policy that can count."""
    asked = request.messages[-1]["content"].removeprefix("What is ").partition("?")[0]
    return f"That makes {evaluate(asked)}."


def test_tasks_are_deterministic_stream_and_do_not_depend_on_how_many() -> None:
    env = {"name": "arithmetic"}
    assert list(make_tasks(env, 50, seed=3)) == list(itertools.islice(make_tasks(env, 10**12, seed=3), 50))
    assert list(make_tasks(env, 50, seed=3)) != list(make_tasks(env, 50, seed=4))
    rows = list(make_tasks(env, 50))
    assert len({row["id"] for row in rows}) == 50
    assert set(rows[0]) == {"id", "responses_create_params", "expected_answer"}


def test_tasks_have_the_right_answers_and_keep_to_the_settings() -> None:
    rows = list(make_tasks({"name": "arithmetic", "operations": ["*"], "max_value": 9}, 200))
    for row in rows:
        asked = row["responses_create_params"]["input"][0]["content"].split()
        assert asked[3] == "*"
        assert 0 <= int(asked[2]) <= 9
    agent = build_agent({"name": "arithmetic"}, {"kind": "scripted", "script": "envs.test_arithmetic:solve"})
    episodes = run(agent, *map(task_of, make_tasks({"name": "arithmetic"}, 200, seed=1)))
    assert {episode.reward for episode in episodes} == {1.0}


@pytest.mark.parametrize(
    ("answer", "correct", "parsed"),
    [("42", 1, 1), ("I say 41, no, 42.0!", 1, 1), ("41", 0, 1), ("forty-two", 0, 0), ("", 0, 0)],
)
def test_grades(answer: str, correct: int, parsed: int) -> None:
    agent = build_agent({"name": "arithmetic"}, {"kind": "scripted", "script": [answer]})
    episode = run_one(agent, question("42"))
    assert episode.reward == correct
    assert episode.turns[0].metrics == {"correct": correct, "format_parse": parsed}
    assert len(episode.turns) == 1


def test_a_row_without_an_answer_fails_before_the_policy_is_asked() -> None:
    asked: list[Request] = []

    def script(request: Request) -> str:
        asked.append(request)
        return "42"

    from rollbook.envs.agents import EnvironmentAgent
    from rollbook.envs.source import open_environment
    from rollbook.policies.scripted import ScriptedPolicy

    for row in ({"responses_create_params": {"input": "?"}}, question("none").row):
        failure = failure_of(
            EnvironmentAgent(open_environment(Arithmetic), ScriptedPolicy(script)), task_of(row)
        )
        assert failure.kind is FailureKind.ENVIRONMENT
        assert "expected_answer" in str(failure)
    assert asked == []


@pytest.mark.parametrize(
    "settings", [{"operations": ["/"]}, {"operations": []}, {"max_value": 0}, {"max": 3}]
)
def test_wrong_settings_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=r"operations|max_value"):
        build_agent({"name": "arithmetic", **settings}, {"kind": "scripted", "script": ["1"]})
