"""What to make of an exception that somebody's environment, policy or grader raised."""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rollbook.errors import RollbookError


class PolicyGone(RollbookError):
    """A policy can serve nobody any more. It ends the job; trying again would only fail again."""


def is_cancellation(error: BaseException) -> bool:
    """Whether the error ends the task on somebody's order, and is no mistake of the code that raised it.

    Other people's code raises more than Exceptions: a panic in Rust is none, nor is a CancelledError that
    leaked out of a library. Those are failures of one rollout like any other.
    """
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is None or task.cancelling() > 0
    return isinstance(error, KeyboardInterrupt | GeneratorExit)


def error_with_place(error: BaseException) -> str:
    """Type, text, file and line: a bare `KeyError: 'x'` says too little to find the mistake."""
    try:
        text = str(error)
    except Exception as another:  # its __str__ is somebody's code, too
        text = f"its text failed with {type(another).__name__}"
    message = f"{type(error).__name__}: {text}" if text else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    return f"{message} ({frames[-1].filename}:{frames[-1].lineno})" if frames else message


def name_and_place(function: Callable[..., Any]) -> str:
    """`Class.method (file:line)`, as far as it is known."""
    owner = getattr(function, "__self__", None)
    name = getattr(function, "__name__", type(function).__name__)
    name = f"{type(owner).__name__}.{name}" if owner is not None else name
    with suppress(TypeError, OSError, ValueError):
        plain = inspect.unwrap(getattr(function, "__func__", function))
        return f"{name} ({inspect.getsourcefile(plain)}:{plain.__code__.co_firstlineno})"
    return name
