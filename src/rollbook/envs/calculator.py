"""`calculator`: a problem of several operations and a tool to work it out with, turn by turn.

The episode ends with the first reply that calls no tool, whose last number is graded, or after `max_turns`
replies. A call that makes no sense is answered with what is wrong with it, as a person would.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from rollbook.envs.answers import as_number, last_number, look_up, same_number
from rollbook.envs.arithmetic import PROBLEM, at_least_one, largest_value, prompt_with_problem
from rollbook.envs.base import Environment
from rollbook.envs.expressions import ExpressionError, evaluate
from rollbook.errors import UsageError
from rollbook.policies.conversion import text_of
from rollbook.rollouts.types import Feedback, Message, Opening, Task

_MOST_OPERATIONS = 20  # an expression of more than that would be too long for the tool
_LARGEST_VALUE = 10**6
TOOL: dict[str, Any] = {
    "type": "function",
    "name": "calculator",
    "description": "Works out an arithmetic expression with numbers, + - * / // % ** and brackets.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "For example (12 + 7) * 3"}},
        "required": ["expression"],
        "additionalProperties": False,
    },
}


class Calculator(Environment):
    """The settings say what tasks it makes: `operations` is how many there are in a problem.

    `prompt` is the question, with the problem in place of {problem}; `digits` sets `max_value`. One
    operation of one digit is enough for a tiny model to learn the tool by.
    """

    stateless = True  # the same calls get the same answers
    version = 1

    def __init__(
        self,
        max_turns: int = 8,
        operations: int = 3,
        max_value: int = 99,
        digits: int | None = None,
        prompt: str = "Use the calculator to work out {problem}. Then answer with the number only.",
    ) -> None:
        self._max_turns = at_least_one("env.max_turns", max_turns)
        self._operations = at_least_one("env.operations", operations)
        self._max_value = largest_value(max_value, digits)
        self._prompt = prompt_with_problem(prompt)
        if operations > _MOST_OPERATIONS or max_value > _LARGEST_VALUE:
            raise UsageError(
                f"env.operations may be at most {_MOST_OPERATIONS}, env.max_value at most {_LARGEST_VALUE}"
            )
        self._expected = ""
        self._turns = self._calls = self._errors = 0

    def start(self, task: Task) -> Opening:
        self._expected = as_number(look_up(task.row, "expected_answer"), "expected_answer")
        tools = [tool for tool in task.tools if _tool_name(tool) != TOOL["name"]]
        return Opening(messages=task.messages, tools=[*tools, TOOL])

    def step(self, message: Message) -> Feedback:
        self._turns += 1
        calls = message.get("tool_calls")
        if not calls:
            return self._graded(message)
        answers = [self._answer(call) for call in (calls if isinstance(calls, list) else [calls])]
        if self._turns >= self._max_turns:
            return Feedback(metrics=self._metrics(False), stop_reason="max_turns")
        return Feedback(done=False, messages=answers, metrics=self._metrics(False))

    def _graded(self, message: Message) -> Feedback:
        number = last_number(text_of(message))
        correct = number is not None and same_number(number, self._expected)
        return Feedback(reward=float(correct), metrics=self._metrics(correct))

    def _answer(self, call: Any) -> Message:
        self._calls += 1
        try:
            result = evaluate(_expression(call))
        except ExpressionError as error:
            self._errors += 1
            result = f"error: {error}"
        name = call.get("id") if isinstance(call, dict) else None
        return {"role": "tool", "tool_call_id": name, "content": result}

    def _metrics(self, correct: bool) -> dict[str, float]:
        return {"correct": float(correct), "tool_calls": self._calls, "tool_errors": self._errors}

    @classmethod
    def tasks(cls, count: int, seed: int = 0, **settings: Any) -> Iterator[dict[str, Any]]:
        return cls(**settings)._tasks(count, seed)

    def _tasks(self, count: int, seed: int) -> Iterator[dict[str, Any]]:
        chance = random.Random(f"calculator-{seed}")
        for number in range(count):
            expression = str(chance.randint(0, self._max_value))
            for _ in range(self._operations):
                expression = f"({expression} {chance.choice('+-*')} {chance.randint(0, self._max_value)})"
            question = self._prompt.replace(PROBLEM, expression[1:-1])
            yield {
                "id": f"calculator-{seed}-{number:06d}",
                "responses_create_params": {"input": [{"role": "user", "content": question}]},
                "expected_answer": evaluate(expression),
            }


def _tool_name(tool: dict[str, Any]) -> Any:
    """The name of a tool, in the flat form of Responses or nested as in chat."""
    return (tool.get("function") or tool).get("name")


def _expression(call: Any) -> str:
    """What a tool call asks to work out; an error says how to ask."""
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or name != TOOL["name"]:
        raise ExpressionError(f"there is no tool {name!r}; there is: {TOOL['name']}")
    arguments = function.get("arguments")
    try:
        given = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        given = None
    expression = given.get("expression") if isinstance(given, dict) else None
    if not isinstance(expression, str):
        raise ExpressionError('the arguments must be JSON like {"expression": "1 + 1"}')
    return expression
