"""Several turns with a tool: the loop, the evaluator, and every way to call a tool wrongly."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from env_helpers import question, run, run_one, task_of
from rollbook.envs.agents import build_agent, make_tasks
from rollbook.envs.calculator import TOOL
from rollbook.envs.expressions import ExpressionError, evaluate
from rollbook.rollouts.types import Request


def call(expression: Any = "1 + 1", *, name: str = "calculator", arguments: Any = None) -> dict[str, Any]:
    given = json.dumps({"expression": expression}) if arguments is None else arguments
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": given}}


def tool_user(request: Request) -> str | dict[str, Any]:
    """Asks the tool for what the question holds, then says what the tool said."""
    last = request.messages[-1]
    if last["role"] == "tool":
        return f"It is {last['content']}."
    found = re.search(r"work out (.*)\. Then", last["content"])
    assert found
    return {"content": "", "tool_calls": [call(found[1])]}


def play(*replies: Any, **settings: Any) -> Any:
    env = {"name": "calculator", **settings}
    return run_one(build_agent(env, {"kind": "scripted", "script": list(replies)}), question("42"))


def test_a_policy_that_uses_the_tool_solves_every_task() -> None:
    agent = build_agent(
        {"name": "calculator"}, {"kind": "scripted", "script": "envs.test_calculator:tool_user"}
    )
    episodes = run(agent, *map(task_of, make_tasks({"name": "calculator"}, 100)))
    assert {episode.reward for episode in episodes} == {1.0}
    first = episodes[0]
    assert [message["role"] for message in first.messages] == ["assistant", "tool", "assistant"]
    assert first.tools == [TOOL]
    assert [step.metrics["tool_calls"] for step in first.turns] == [1, 1]
    assert len(first.turns) == 2
    assert first.usage.output_tokens > 0


def test_tasks_are_deterministic_and_as_long_as_told() -> None:
    env = {"name": "calculator", "operations": 5, "max_value": 7}
    rows = list(make_tasks(env, 20, seed=2))
    assert rows == list(make_tasks(env, 20, seed=2))
    for row in rows:
        asked = row["responses_create_params"]["input"][0]["content"]
        assert len(re.findall(r" [-+*] ", asked)) == 5
    longest = {"name": "calculator", "operations": 20, "max_value": 10**6}
    assert len(list(make_tasks(longest, 50))) == 50


@pytest.mark.parametrize(
    "wrong",
    [
        call(name="python"),
        call(arguments="{not json"),
        call(arguments="[]"),
        call(arguments='{"expr": "1"}'),
        call(arguments="[" * 100_000),
        call(5),
        call("1 / 0"),
        call("__import__('os').system('true')"),
        {"id": "c1", "type": "function"},
        {"id": "c1", "function": "calculator"},
        "calculator",
        None,
    ],
)
def test_a_wrong_call_is_answered_and_the_episode_goes_on(wrong: Any) -> None:
    episode = play({"content": "", "tool_calls": [wrong]}, "42")
    assert episode.reward == 1.0
    assert episode.messages[1]["content"].startswith("error: ")
    assert episode.turns[-1].metrics == {"correct": 1.0, "tool_calls": 1, "tool_errors": 1}


def test_several_calls_in_one_reply_are_all_answered() -> None:
    episode = play({"content": "", "tool_calls": [call("6 * 7"), call("1 +")]}, "so 42")
    assert [message["content"] for message in episode.messages[1:3]] == [
        "42",
        "error: this is not an arithmetic expression",
    ]
    assert episode.turns[-1].metrics["tool_errors"] == 1


def test_it_ends_after_max_turns_without_a_reward() -> None:
    episode = play({"content": "42", "tool_calls": [call()]}, max_turns=3)
    assert (episode.reward, episode.stop_reason, len(episode.turns)) == (0.0, "max_turns", 3)
    assert episode.turns[-1].metrics == {"correct": 0.0, "tool_calls": 3, "tool_errors": 0}


def test_a_row_that_brings_the_tool_does_not_have_it_twice() -> None:
    row = question("42").row
    other = {"type": "function", "name": "other"}
    row["responses_create_params"] = {"input": "?", "tools": [TOOL, other]}
    agent = build_agent({"name": "calculator"}, {"kind": "scripted", "script": ["42"]})
    assert run_one(agent, task_of(row)).tools == [other, TOOL]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"),
        ("(1 + 2) * -3", "-9"),
        ("10 / 4", "2.5"),
        ("8 / 4", "2"),
        ("2 ** 10", "1024"),
        ("2 ** -1", "0.5"),
        ("7 // 2 + 7 % 2", "4"),
        (" 1_000 ", "1000"),
        ("9 ** 99", str(9**99)),
    ],
)
def test_expressions(expression: str, value: str) -> None:
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "2 ^ 3",
        "9 ** 9 ** 9",
        "9 ** 9999",
        "10 ** 1000 * 10 ** 1000",
        "1e999",
        "1e308 * 10",
        "(-8) ** 0.5",
        "0 ** -1",
        "1 if 2 else 3",
        "a + 1",
        "f(1)",
        "'a' * 9",
        "True + 1",
        "1j",
        "[1][0]",
        "1 << 99",
        "x := 1",
        "(" * 300 + ")" * 300,
        "-" * 400 + "1",
        "1" * 501,
        "1\x00",
        "\ud800",
        "10 ** 1024 / 3",
    ],
)
def test_what_is_no_expression_is_an_error_with_a_reason(expression: str) -> None:
    with pytest.raises(ExpressionError, match=r"\w"):
        evaluate(expression)


@settings(deadline=None, max_examples=300)
@given(st.text(alphabet="0123456789+-*/%(). e_", max_size=40))
def test_any_text_has_a_value_or_an_error(expression: str) -> None:
    try:
        value = evaluate(expression)
    except ExpressionError:
        return
    ast.literal_eval(value)
