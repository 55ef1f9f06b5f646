"""The event loop of collectors and workers: uvloop's, which is twice as fast here, where it is installed."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

T = TypeVar("T")
_ALLOCATIONS_BETWEEN_SEARCHES = 20_000


def event_loop() -> asyncio.Runner:
    """Loads what it needs at once, and begins when it is entered."""
    if sys.platform != "win32":
        with suppress(ImportError):
            import uvloop

            return asyncio.Runner(loop_factory=uvloop.new_event_loop)
    return asyncio.Runner()


def run_to_the_end(runner: asyncio.Runner, work: Coroutine[Any, Any, T]) -> T:
    """Runs it and waits; in a thread of its own where an event loop is running here, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        with runner:
            return runner.run(work)
    with ThreadPoolExecutor(1, "rollbook-collect") as threads:
        loop, started = runner.get_loop(), list[asyncio.Task[Any]]()

        async def watched() -> T:
            started.extend(filter(None, [asyncio.current_task()]))
            return await work

        def serve() -> T:
            with runner:
                return runner.run(watched())

        running = threads.submit(serve)
        try:
            return running.result()
        except KeyboardInterrupt:  # which reaches this thread alone; leaving the block waits for the other
            for task in started:
                loop.call_soon_threadsafe(task.cancel)
            raise


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
