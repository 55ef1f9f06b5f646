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
import logging
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, ClassVar

import msgspec

from rollbook.policies.base import Completion, Message, is_for_the_task
from rollbook.policies.conversion import text_of

_log = logging.getLogger("rollbook")


class Task(msgspec.Struct):
    """What an episode starts from: one row of the input, in chat form."""

    id: str
    row: dict[str, Any]  # the whole input row, with whatever the grader needs
    messages: list[Message]
    tools: list[dict[str, Any]] = []
    params: dict[str, Any] = {}  # sampling parameters, under their Responses names
    repeat: int = 0
    reply: Completion | None = None  # that an earlier attempt had, and could not have judged


class Start(msgspec.Struct):
    messages: list[Message]
    tools: list[dict[str, Any]] = []


class Feedback(msgspec.Struct):
    """What an environment makes of a reply. `messages` are shown to the policy unless `done`."""

    reward: float = 0.0
    done: bool = True
    messages: list[Message] = []
    metrics: dict[str, Any] = {}
    logs: dict[str, Any] = {}
    stop_reason: str | None = None  # why it is done, when it is not simply that the policy stopped


class Environment:
    """One episode. Settings of the config's `env:` arrive as keyword arguments of the constructor."""

    # Whether grading a stored answer again gives what grading it live gave: `data reverify` asks.
    stateless: ClassVar[bool] = False
    # Further modules whose code decides the reward; their digest stands in a collection's manifest.
    sources: ClassVar[tuple[str, ...]] = ()

    def start(self, task: Task) -> Start | Awaitable[Start]:
        return Start(messages=task.messages, tools=task.tools)

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


EnvironmentFactory = Callable[[], Environment]


class SharingFactory:
    """Makes the environment of an episode, and closes what the episodes shared."""

    def __init__(self, kind: type[Environment], settings: Mapping[str, Any]) -> None:
        self._kind = kind
        self._shared = kind.shared(**settings)
        self._arguments = {**settings, **self._shared}

    def __call__(self) -> Environment:
        return self._kind(**self._arguments)

    async def close(self) -> None:
        for name, resource in self._shared.items():
            try:
                close = getattr(resource, "close", None)
                closing = close() if close is not None else None
                if isinstance(closing, Awaitable):
                    await closing
            except BaseException as error:  # the episodes are over, and the others want closing too
                if is_for_the_task(error):
                    raise
                _log.warning("%s: closing %r: %s", self._kind.__name__, name, what_and_where(error))


def what_and_where(error: BaseException) -> str:
    """What somebody's code raised, and the line of it: a KeyError alone says too little to look for it."""
    try:
        text = str(error)
    except Exception as another:  # even its words are somebody's code
        text = f"its text failed with {type(another).__name__}"
    said = f"{type(error).__name__}: {text}" if text else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    return f"{said} ({frames[-1].filename}:{frames[-1].lineno})" if frames else said


Grade = float | bool | Mapping[str, Any] | Feedback
Grader = Callable[..., Grade | Awaitable[Grade]]


class SingleTurn(Environment):
    """The policy answers once; the grade is the reward."""

    stateless = True
    grader: ClassVar[Grader]

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        self._task: Task | None = None

    def start(self, task: Task) -> Start:
        self._task = task
        return Start(messages=task.messages, tools=task.tools)

    def step(self, message: Message) -> Feedback | Awaitable[Feedback]:
        grade = type(self).grader(self._task, text_of(message), **self._settings)
        if isinstance(grade, Awaitable):
            return _awaited(grade)
        return as_feedback(grade)


def single_turn(grader: Grader) -> type[SingleTurn]:
    """An environment from a function `(task, answer) -> reward`; settings come as keyword arguments.

    It may return a number, a bool, a dict with `reward` and metrics beside it, or a Feedback.
    """
    environment = type(grader.__name__, (SingleTurn,), {"grader": staticmethod(grader)})
    functools.update_wrapper(environment, grader, updated=())
    return environment


def as_feedback(grade: Grade) -> Feedback:
    if isinstance(grade, Feedback):
        return grade
    if isinstance(grade, Mapping):
        rest = {key: value for key, value in grade.items() if key != "reward"}
        if "reward" not in grade:
            raise ValueError(f"a grader returned {dict(grade)!r}, which has no 'reward'")
        return Feedback(
            reward=float(grade["reward"]),
            metrics={key: value for key, value in rest.items() if isinstance(value, int | float)},
            logs={key: value for key, value in rest.items() if not isinstance(value, int | float)},
        )
    return Feedback(reward=float(grade))


async def _awaited(grade: Awaitable[Grade]) -> Feedback:
    return as_feedback(await grade)
