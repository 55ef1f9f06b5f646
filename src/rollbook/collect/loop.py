"""The event loop of collectors and workers: uvloop's, which is twice as fast here, where it is installed.

It runs in a thread of its own, and functions of the user in the thread that called (`rollouts/caller.py`).
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from typing import Any, TypeVar

from rollbook.rollouts.caller import CALLER, CallerThread

_ALLOCATIONS_BETWEEN_SEARCHES = 20_000
T = TypeVar("T")


def run_in_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run it in a new event loop, beside this thread, where one may run already, as in a notebook."""
    caller = CallerThread()
    tasks: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

    async def noted() -> T:
        task = asyncio.current_task()
        assert task is not None
        tasks.append((task.get_loop(), task))
        CALLER.set(caller)
        return await main

    def run() -> T:
        try:
            with _event_loop() as runner, seldom_collecting_garbage():
                return runner.run(noted())
        finally:
            caller.end()

    with ThreadPoolExecutor(1, "rollbook-loop") as thread:
        running = thread.submit(copy_context().run, run)
        try:
            caller.serve()
        except BaseException:  # of a signal, which this thread hears; leaving the block waits for the other
            for loop, task in tasks:
                with suppress(RuntimeError):
                    loop.call_soon_threadsafe(task.cancel)
            raise
        return running.result()


def _event_loop() -> asyncio.Runner:
    if sys.platform != "win32":
        with suppress(ImportError):
            import uvloop

            return asyncio.Runner(loop_factory=uvloop.new_event_loop)
    return asyncio.Runner()


@contextmanager
def seldom_collecting_garbage(allocations: int = _ALLOCATIONS_BETWEEN_SEARCHES) -> Iterator[None]:
    """Search for reference cycles every so many new objects instead of every 700.

    What is in flight is a few thousand objects that live for one request: searched as often as Python does
    by itself, they are found alive again and again, a sixth of the processor time of a rollout.
    """
    before = gc.get_threshold()
    if 0 < before[0] < allocations:  # 0: somebody switched it off
        gc.set_threshold(allocations, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
