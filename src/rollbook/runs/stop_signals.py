"""Signals that ask a job to stop: remembered until it has come to a good place, and obeyed there."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Self

from rollbook.errors import RollbookError

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stopped(RollbookError):
    """Raised after a signal: the checkpoint is saved and --resume continues."""

    exit_code = 130


class StopSignals:
    """`with StopSignals("saving after this iteration") as stop: ... if stop.asked: ...`

    A second Ctrl-C raises KeyboardInterrupt at once. Signals that were ignored when the job began stay so,
    and outside the main thread, where Python handles no signals, nothing is ever asked.
    """

    def __init__(self, what_follows: str | None) -> None:
        """`what_follows` is said when a signal comes; None where another process says it."""
        self._what_follows = what_follows
        self._before: dict[signal.Signals, object] = {}
        self.asked = False
        self.by_job = False  # it was the job itself that asked
        self.reason: str | None = None
        self._asked_at: float | None = None

    @property
    def asked_for_s(self) -> float:
        """Seconds since the job was asked to stop."""
        return 0.0 if self._asked_at is None else time.monotonic() - self._asked_at

    def ask(self, reason: str) -> None:
        """Ask from inside the job, as a signal does from outside."""
        self.asked = self.by_job = True
        if self._asked_at is None:
            self._asked_at = time.monotonic()
        self.reason = self.reason or reason

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self._asked_at is None:
            self._asked_at = time.monotonic()
        self.asked, self.reason = True, signal.Signals(number).name
        if self._what_follows is not None:
            # Not by print: the signal may have come while that was writing.
            start = "\n" if os.isatty(2) else ""  # a progress bar may stand on the line
            os.write(2, f"{start}{signal.Signals(number).name}: {self._what_follows}\n".encode())
