"""`arithmetic`: one sum, difference or product of small numbers, and the last number of the answer.

The smallest environment with a verifiable answer: it makes its own tasks and needs no data.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from rollbook.envs.answers import as_number, last_number, look_up, same_number
from rollbook.envs.base import Environment
from rollbook.errors import UsageError
from rollbook.policies.conversion import text_of
from rollbook.rollouts.types import Feedback, Message, Opening, Task

OPERATIONS = ("+", "-", "*")
PROBLEM = "{problem}"  # in a prompt
_MOST_DIGITS = 6


class Arithmetic(Environment):
    """The settings say what tasks it makes; any row with an `expected_answer` is graded.

    `prompt` is the question, with the problem in place of {problem}; `digits` sets `max_value`.
    """

    stateless = True
    most_turns = 1
    version = 1

    def __init__(
        self,
        operations: Sequence[str] = OPERATIONS,
        max_value: int = 99,
        digits: int | None = None,
        prompt: str = "What is {problem}? Answer with the number only.",
    ) -> None:
        unknown = [operation for operation in operations if operation not in OPERATIONS]
        if unknown or not operations or isinstance(operations, str):
            raise UsageError(f"env.operations is {operations!r}; write a list of {', '.join(OPERATIONS)}")
        self._operations = tuple(operations)
        self._max_value = largest_value(max_value, digits)
        self._prompt = prompt_with_problem(prompt)
        self._expected = ""

    def start(self, task: Task) -> Opening:
        self._expected = as_number(look_up(task.row, "expected_answer"), "expected_answer")
        return Opening(messages=task.messages, tools=task.tools)

    def step(self, message: Message) -> Feedback:
        number = last_number(text_of(message))
        correct = number is not None and same_number(number, self._expected)
        metrics = {"correct": float(correct), "format_parse": float(number is not None)}
        return Feedback(reward=float(correct), metrics=metrics)

    @classmethod
    def tasks(cls, count: int, seed: int = 0, **settings: Any) -> Iterator[dict[str, Any]]:
        return cls(**settings)._tasks(count, seed)

    def _tasks(self, count: int, seed: int) -> Iterator[dict[str, Any]]:
        chance = random.Random(f"arithmetic-{seed}")
        for number in range(count):
            one, other = chance.randint(0, self._max_value), chance.randint(0, self._max_value)
            operation = chance.choice(self._operations)
            answer = {"+": one + other, "-": one - other, "*": one * other}[operation]
            question = self._prompt.replace(PROBLEM, f"{one} {operation} {other}")
            yield {
                "id": f"arithmetic-{seed}-{number:06d}",
                "responses_create_params": {"input": [{"role": "user", "content": question}]},
                "expected_answer": str(answer),
            }


def largest_value(max_value: int, digits: int | None) -> int:
    if digits is None:
        return at_least_one("env.max_value", max_value)
    if at_least_one("env.digits", digits) > _MOST_DIGITS:
        raise UsageError(f"env.digits is {digits}; it may be at most {_MOST_DIGITS}")
    return int(10**digits - 1)


def prompt_with_problem(prompt: str) -> str:
    if not isinstance(prompt, str) or PROBLEM not in prompt:
        raise UsageError(f"env.prompt is {prompt!r}; it must be text with {PROBLEM} in it")
    return prompt


def at_least_one(key: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{key} is {value!r}; it must be a whole number of at least 1")
    return value
