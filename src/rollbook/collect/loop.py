"""The event loop of collectors and workers: uvloop's, which is twice as fast here, where it is installed."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress


def event_loop() -> asyncio.Runner:
    """Loads what it needs at once, and begins when it is entered."""
    if sys.platform != "win32":
        with suppress(ImportError):
            import uvloop

            return asyncio.Runner(loop_factory=uvloop.new_event_loop)
    return asyncio.Runner()
