"""Functions of the user run in the thread that asked for a job; the event loop runs in one of its own.

A grader that computes or waits without `await` would keep the loop from everything else: answers, time
limits, signals. It runs beside the loop instead, one function at a time as before, so what it shares needs no
locks, and in the caller's own thread, where code that sets alarms works (math-verify does).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar, copy_context
from queue import SimpleQueue
from typing import Any, NamedTuple


class Outcome(NamedTuple):
    """What a function returned, or the exception it raised."""

    result: Any = None
    error: BaseException | None = None


class CallerThread:
    """The one thread that calls `serve`, until another one calls `end`."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    def serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def end(self) -> None:
        self._calls.put(None)

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Outcome:
        """Call it in that thread, unless nobody waits for it any more when its turn comes."""
        loop, context = asyncio.get_running_loop(), copy_context()
        future: asyncio.Future[Outcome] = loop.create_future()

        def settle(outcome: Outcome) -> None:
            if not future.done():
                future.set_result(outcome)

        def call() -> None:
            if future.cancelled():
                return
            outcome = Outcome()
            try:
                outcome = Outcome(context.run(function, *arguments))
            except BaseException as error:  # an exit or a panic of the function is its failure
                outcome = Outcome(error=error)
                if isinstance(error, KeyboardInterrupt):  # which is meant for the whole job
                    raise
            finally:
                with suppress(RuntimeError):  # the loop is over
                    loop.call_soon_threadsafe(settle, outcome)

        self._calls.put(call)
        return await future


CALLER: ContextVar[CallerThread | None] = ContextVar("CALLER", default=None)


def caller_for(function: Callable[..., Any], kind: type[Any] | None) -> CallerThread | None:
    """Where to run a function of an environment of this kind; None: here, as what is ours or `async`."""
    caller = CALLER.get()
    if caller is None or kind is None or _is_ours(kind) or inspect.iscoroutinefunction(function):
        return None
    is_inherited = _is_ours(getattr(function, "__func__", function))
    return None if is_inherited and function.__name__ not in _CALLS_USERS_CODE else caller


_CALLS_USERS_CODE = ("step", "make")  # ours, around a grading function or a constructor of the user's


def _is_ours(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).startswith("rollbook.")
