"""`dataset`: rows with an expected answer, one reply each, graded by one of a few graders.

env: {name: dataset, grader: number, answer_key: reward_model.ground_truth}
env: {name: dataset, grader: exact, pattern: 'ANSWER: (\\w+)', ignore_case: true}
env: {name: dataset, grader: judge, judge: {base_url: http://127.0.0.1:8000/v1, model: m}}
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from rollbook.envs.base import Environment
from rollbook.envs.graders import Grader, make_grader
from rollbook.policies.conversion import text_of
from rollbook.rollouts.types import Feedback, Message, Opening, Task


class Dataset(Environment):
    """Settings are those of `graders.GraderSettings`."""

    stateless = True
    most_turns = 1
    version = 1

    def __init__(self, grader: str | Grader = "exact", **settings: Any) -> None:
        self._owns_grader = isinstance(grader, str)
        self._grader = make_grader({"grader": grader, **settings}) if isinstance(grader, str) else grader
        self._task: Task | None = None
        self._expected: Any = None

    @classmethod
    def shared(cls, **settings: Any) -> dict[str, Any]:
        return {"grader": make_grader(settings)}

    def start(self, task: Task) -> Opening:
        self._task, self._expected = task, self._grader.expected(task.row)
        return Opening(messages=task.messages, tools=task.tools)

    def step(self, message: Message) -> Feedback | Awaitable[Feedback]:
        if self._task is None:
            raise RuntimeError("step(message) before start(task)")
        return self._grader.grade(self._task, self._expected, text_of(message))

    def close(self) -> Awaitable[None] | None:
        return self._grader.close() if self._owns_grader else None
