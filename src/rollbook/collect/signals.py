"""INT and TERM in a collection: the first lets what is under way finish, the second stops at once, the third
ends the process.

Once every rollout is written, only the record of them is under way (the check of the file, its digest, the
history): one signal does not keep a collection that has everything from being complete.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from rollbook.collect.results import Results
from rollbook.errors import Interrupted

_STOPPED_AT_ONCE = 130
_NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """What the signals of a collection do. `with signals.heard(): ...`

    The main thread hears them, and not that of the event loop; elsewhere Python handles none. In a notebook,
    whose own loop runs in that thread, an interrupt ends the cell at once, as it does elsewhere.
    """

    def __init__(self, results: Results) -> None:
        self._results = results
        self._received = 0
        self._task: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        self._has_rollouts = True

    @contextmanager
    def heard(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread() or _is_notebook():
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in _NUMBERS}
        try:
            yield
        finally:
            for number, old in before.items():
                signal.signal(number, old)

    @contextmanager
    def cancel_this_task(self) -> Iterator[None]:
        """The task that runs rollouts is what a second signal cancels."""
        task = asyncio.current_task()
        assert task is not None
        self._task = task.get_loop(), task
        try:
            yield
        except asyncio.CancelledError:
            raise Interrupted from None
        finally:
            self._task = None

    def end_of_rollouts(self) -> None:
        """From here on a second signal raises `Interrupted`; it may have come already."""
        self._has_rollouts = False
        if self._received > 1:
            raise Interrupted

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._received += 1
        name = signal.Signals(number).name
        if self._received == 1:
            _write_now(f"{name}{self._what_follows()}; again to stop at once")
            self._results.stop.request(f"{name} received")
        elif self._received > 2:
            _write_now(f"{name}: ended; rerun the same command to resume")
            os._exit(_STOPPED_AT_ONCE)
        elif not self._has_rollouts:
            raise Interrupted
        elif self._task is not None:
            loop, task = self._task
            loop.call_soon_threadsafe(task.cancel)

    def _what_follows(self) -> str:
        if not self._has_rollouts:
            return ": checking what was collected and writing the manifest"
        running = self._results.runner
        return "" if running is None else f": {running.what_a_stop_does()}"


def _is_notebook() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _write_now(text: str) -> None:
    """Write to the terminal without `print`, which the signal may have interrupted."""
    with suppress(OSError):
        os.write(2, f"{text}\n".encode())
