"""The event loop of collectors and workers: uvloop's, which is twice as fast here, where it is installed."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

_ALLOCATIONS_BETWEEN_SEARCHES = 20_000
T = TypeVar("T")


def run_in_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run it in a new event loop; in another thread where one runs in this one, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        with _event_loop() as runner, seldom_collecting_garbage():
            return runner.run(main)
    tasks: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

    async def noted() -> T:
        task = asyncio.current_task()
        assert task is not None
        tasks.append((task.get_loop(), task))
        return await main

    with ThreadPoolExecutor(1, "rollbook-collect") as thread:
        running = thread.submit(lambda: run_in_loop(noted()))
        try:
            return running.result()
        except KeyboardInterrupt:  # which reaches this thread alone; leaving the block waits for the other
            for loop, task in tasks:
                loop.call_soon_threadsafe(task.cancel)
            raise


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
