"""The event loop of collectors and workers: uvloop's, which is twice as fast here, where it is installed."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_ALLOCATIONS_BETWEEN_SEARCHES = 20_000


def event_loop() -> asyncio.Runner:
    """Loads what it needs at once, and begins when it is entered."""
    if sys.platform != "win32":
        with suppress(ImportError):
            import uvloop

            return asyncio.Runner(loop_factory=uvloop.new_event_loop)
    return asyncio.Runner()


@contextmanager
def seldom_collecting_garbage() -> Iterator[None]:
    """Search for reference cycles every 20,000 new objects instead of every 700.

    What is in flight is a few thousand objects that live for one request: searched as often as Python does
    by itself, they are found alive again and again, a sixth of the processor time of a rollout.
    """
    before = gc.get_threshold()
    if 0 < before[0] < _ALLOCATIONS_BETWEEN_SEARCHES:  # 0: somebody switched it off
        gc.set_threshold(_ALLOCATIONS_BETWEEN_SEARCHES, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
