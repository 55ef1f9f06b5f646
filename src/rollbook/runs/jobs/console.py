"""A child's output as it goes into the log file: every line, no carriage returns.

A progress bar rewrites its line hundreds of times; the log keeps what it showed when the line ended, and
every half minute, so that a log that is being followed still moves. Text without carriage
returns is passed on at once, whole line or not, in whatever encoding it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_SHOW_PROGRESS_EVERY_S = 30.0
_LONGEST_PENDING = 1 << 16  # a "progress bar" longer than this is text


class CarriageReturns:
    """Turns a stream with carriage returns into one without: `feed` what came, write what it returns."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at_line_start = True  # nothing has been passed on since the last newline
        self._overwriting = False  # a carriage return was seen on this line
        self._shown = b""  # the last text between two carriage returns
        self._pending = b""  # the text since the last carriage return
        self._last_output = clock()

    def feed(self, data: bytes) -> bytes:
        out: list[bytes] = []
        if not self._overwriting and b"\r" not in data:
            self._pass_on(out, data)
        else:
            for line in _split_after_newlines(data):
                self._line(out, line)
        if out:
            self._last_output = self._clock()
        elif self._overwriting and self._clock() - self._last_output > _SHOW_PROGRESS_EVERY_S:
            self._show_progress(out)
        return b"".join(out)

    def finish(self) -> bytes:
        """What is still held back when the stream ends; the log ends with a newline."""
        out: list[bytes] = []
        if self._overwriting:
            self._end_overwriting(out)
        if not self._at_line_start:
            self._pass_on(out, b"\n")
        return b"".join(out)

    def _line(self, out: list[bytes], line: bytes) -> None:
        ended = line.endswith(b"\n")
        first, *rest = (line[:-1] if ended else line).split(b"\r")
        if self._overwriting:
            self._pending += first
        else:
            self._pass_on(out, first)
        for piece in rest:
            self._overwriting = True
            self._shown = self._pending or self._shown
            self._pending = piece
        if ended:
            self._end_overwriting(out)
            self._pass_on(out, b"\n")
        elif len(self._pending) > _LONGEST_PENDING:
            self._end_overwriting(out)

    def _end_overwriting(self, out: list[bytes]) -> None:
        """Pass on what a terminal would show, on a line of its own if the line had begun as plain text."""
        text = (self._pending or self._shown).rstrip(b" ") if self._overwriting else b""
        if text and not self._at_line_start:
            self._pass_on(out, b"\n")
        self._pass_on(out, text)
        self._overwriting, self._shown, self._pending = False, b"", b""

    def _show_progress(self, out: list[bytes]) -> None:
        self._last_output = self._clock()
        text = (self._pending or self._shown).rstrip(b" ")
        if text:
            self._pass_on(out, (b"" if self._at_line_start else b"\n") + text + b"\n")

    def _pass_on(self, out: list[bytes], data: bytes) -> None:
        if data:
            out.append(data)
            self._at_line_start = data.endswith(b"\n")


def _split_after_newlines(data: bytes) -> list[bytes]:
    lines = data.split(b"\n")
    return [line + b"\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
