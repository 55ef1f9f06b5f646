"""Signals as a queue: noted by the handlers, acted on by the loop that waits on `descriptor`."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from types import FrameType
from typing import Any, NamedTuple, Self

from rollbook.errors import UsageError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Arrival(NamedTuple):
    signal: signal.Signals
    at: float  # of time.monotonic()


class SignalQueue:
    """While open, INT, TERM and HUP are queued, and they, a child's end and a new window size wake the loop.

    A signal that was ignored when we were started stays ignored: that is what `nohup` is for.
    """

    def __init__(self) -> None:
        self.resized = False
        self._stops: list[Arrival] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self.descriptor, self._sink = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            self._wakeup_before = signal.set_wakeup_fd(self._sink, warn_on_full_buffer=False)
        except ValueError:
            os.close(self.descriptor)
            os.close(self._sink)
            raise UsageError("a run can only be supervised from the main thread of a process") from None
        for number in (*STOP_SIGNALS, signal.SIGCHLD, signal.SIGWINCH):
            if number in STOP_SIGNALS and signal.getsignal(number) is signal.SIG_IGN:
                continue
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self.descriptor)
        os.close(self._sink)

    def take(self) -> list[Arrival]:
        """The stop signals that came since the last look."""
        taken, self._stops = self._stops, []
        return taken

    def drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self.descriptor, 4096):
                continue

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number in STOP_SIGNALS:
            self._stops.append(Arrival(signal.Signals(number), time.monotonic()))
        elif number == signal.SIGWINCH:
            self.resized = True
