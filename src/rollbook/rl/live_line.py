"""The last line of a terminal: what is under way now, written over until something is there to stay."""

from __future__ import annotations

import os
import threading
from typing import TextIO


class LiveLine:
    """Shows nothing where the stream is no terminal. Several threads may show and clear."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._is_on = stream, stream.isatty()
        self._shown = 0  # characters
        self._guard = threading.Lock()

    def show(self, text: str) -> None:
        if self._is_on:
            with self._guard:
                text = text[: self._room()]
                self._stream.write("\r" + text.ljust(self._shown))
                self._stream.flush()
                self._shown = len(text)

    def clear(self) -> None:
        if self._shown:
            with self._guard:
                self._stream.write("\r" + " " * self._shown + "\r")
                self._stream.flush()
                self._shown = 0

    def _room(self) -> int:
        """One less than the width: a terminal goes on to the next line after its last column."""
        try:
            return max(1, os.get_terminal_size(self._stream.fileno()).columns - 1)
        except OSError:
            return 79
