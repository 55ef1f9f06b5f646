"""An environment acts on messages: it gives the first ones, answers each reply, and says what it earned.

    class Guess(Environment):
        def start(self, task): ...            # the opening messages and tools; the row's own by default
        def step(self, message): ...          # a Feedback: reward, metrics, logs, next messages, done

One object is one episode. Methods may be `async`. Most environments are a single turn and a grade; those
are a function:

    @single_turn
    def exact(task, answer):
        return answer.strip() == task.row["expected_answer"]
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, ClassVar

from rollbook.policies.conversion import text_of
from rollbook.rollouts.failures import name_and_place
from rollbook.rollouts.types import FailureKind, Feedback, Message, Opening, RolloutFailure, Task


class Environment:
    """One episode. Settings of the config's `env:` arrive as keyword arguments of the constructor."""

    # Whether grading a stored answer again gives what grading it live gave; `data reverify` requires it.
    stateless: ClassVar[bool] = False
    # Further modules whose code decides the reward; their digest is in a collection's manifest.
    sources: ClassVar[tuple[str, ...]] = ()
    # Replies of an episode at most, where the class knows: `rollbook rl` makes room for no more than that.
    most_turns: ClassVar[int | None] = None
    # Of a built-in environment, in place of digests: raised when the same answer earns another reward.
    version: ClassVar[int | None] = None

    def start(self, task: Task) -> Opening | Awaitable[Opening]:
        return Opening(messages=task.messages, tools=task.tools)

    def step(self, message: Message) -> Feedback | Awaitable[Feedback]:
        raise NotImplementedError(f"{type(self).__name__} has no step(message)")

    def close(self) -> Awaitable[None] | None:
        """Called once when the episode is over, however it ended."""
        return None

    @classmethod
    def shared(cls, **settings: Any) -> dict[str, Any]:
        """What all episodes have in common (a client, a table), made once from the settings.

        It reaches every constructor under its name, over the setting of that name, and what has a `close`
        is closed after the last episode.
        """
        return {}

    @classmethod
    def tasks(cls, count: int, seed: int = 0, **settings: Any) -> Iterator[dict[str, Any]]:
        """Rows of its own making, for environments that need no input file."""
        raise NotImplementedError(f"{cls.__name__} makes no tasks of its own; give it an input file")


Grade = float | bool | Mapping[str, Any] | Feedback
Grader = Callable[..., Grade | Awaitable[Grade]]


class SingleTurn(Environment):
    """The policy answers once; the grade is the reward."""

    stateless = True
    most_turns = 1
    grader: ClassVar[Grader]

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        self._task: Task | None = None

    def start(self, task: Task) -> Opening:
        self._task = task
        return Opening(messages=task.messages, tools=task.tools)

    def step(self, message: Message) -> Feedback | Awaitable[Feedback]:
        grade = type(self).grader(self._task, text_of(message), **self._settings)
        if isinstance(grade, Awaitable):
            return _awaited(grade, type(self).grader)
        return as_feedback(grade, type(self).grader)


def single_turn(grader: Grader) -> type[SingleTurn]:
    """An environment from a function `(task, answer) -> reward`; settings come as keyword arguments.

    It may return a number, a bool, a dict with `reward` and metrics beside it, or a Feedback.
    """
    environment = type(grader.__name__, (SingleTurn,), {"grader": staticmethod(grader)})
    functools.update_wrapper(environment, grader, updated=())
    return environment


def as_feedback(grade: Grade, grader: Grader) -> Feedback:
    """What a grader returned; something else is a failure that names the grader's function and file."""
    if isinstance(grade, Feedback):
        return grade
    fields = grade if isinstance(grade, Mapping) else {"reward": grade}
    rest = {key: value for key, value in fields.items() if key != "reward"}
    return Feedback(
        reward=_reward(fields.get("reward", _NOTHING), grade, grader),
        metrics={key: value for key, value in rest.items() if isinstance(value, int | float)},
        logs={key: value for key, value in rest.items() if not isinstance(value, int | float)},
    )


_NOTHING = object()


def _reward(reward: Any, grade: Grade, grader: Grader) -> float:
    try:
        return float(reward)
    except (TypeError, ValueError):
        why = ", which has no 'reward'" if reward is _NOTHING else ""
    raise RolloutFailure(
        FailureKind.ENVIRONMENT,
        f"{name_and_place(grader)} returned {grade!r:.200}{why}; a grader returns a number, a bool, "
        "a dict with 'reward', or a Feedback",
    )


async def _awaited(grade: Awaitable[Grade], grader: Grader) -> Feedback:
    return as_feedback(await grade, grader)
