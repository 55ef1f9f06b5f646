"""Whether the event loop of a thread still turns, and where its thread is if it does not.

An environment whose `step` computes or waits without `await` holds up every rollout, and no time limit of the
loop can end it. So another thread looks.
"""

from __future__ import annotations

import asyncio
import sys
import sysconfig
import threading
import time
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import rollbook

_OTHERS = (str(Path(rollbook.__file__).parent), sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))


class Blocked(NamedTuple):
    """A function that does not return, and for how long."""

    place: str  # function (file:line)
    seconds: float


class Pulse:
    def __init__(self, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
        self._loop, self._thread = loop, thread
        self._asked_at: float | None = None  # not answered yet

    def look(self) -> Blocked | None:
        """Ask the loop to answer; what it is busy with if it has not answered the question before."""
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            self._loop.call_soon_threadsafe(self._answer)
            return None
        seconds = time.monotonic() - self._asked_at
        frame = sys._current_frames().get(self._thread.ident or 0)
        return None if frame is None else Blocked(_place(frame), seconds)

    def answers_within(self, seconds: float) -> bool:
        answered = threading.Event()
        self._loop.call_soon_threadsafe(answered.set)
        return answered.wait(seconds)

    def _answer(self) -> None:
        self._asked_at = None


def _place(frame: FrameType) -> str:
    """The innermost function of the user's own, or if there is none, of all."""
    innermost = frame
    outer: FrameType | None = frame
    while outer is not None and outer.f_code.co_filename.startswith((*_OTHERS, "<")):
        outer = outer.f_back
    found = outer or innermost
    return f"{found.f_code.co_name} ({found.f_code.co_filename}:{found.f_lineno})"
