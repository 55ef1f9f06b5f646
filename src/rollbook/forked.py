"""Work on another core, in a copy of this process: it has all that this one has, and hashes as it does.

For work that holds the interpreter's lock, which threads cannot share. The copy must run nothing but plain
computation and files of its own: of the threads of this process it has none, and their locks may be held.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")
_PIPE_BYTES = 1 << 20  # what anyone may have; results of megabytes pass through it in fewer turns


class InACopy(Generic[T]):
    """Begins at once. Where processes cannot be copied safely, the work is done here when it is asked for."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._pid: int | None = None
        if sys.platform == "linux":
            self._reader, writer = os.pipe()
            with suppress(OSError):  # it is only slower
                fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            self._pid = os.fork()
            if self._pid == 0:
                _send(work, writer)
            os.close(writer)

    def result(self) -> T:
        """If the copy was killed, or met an error, the work is done here, and the error met here."""
        if self._pid is None:
            return self._work()
        try:
            with os.fdopen(self._reader, "rb", closefd=False) as pipe:
                done: T = pickle.load(pipe)
        except (EOFError, pickle.UnpicklingError):
            done = self._work()
        finally:
            self.close()
        return done

    def close(self) -> None:
        """Let go of it, whether it is done or not."""
        if self._pid is not None:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            os.close(self._reader)
            self._pid = None


def _send(work: Callable[[], T], writer: int) -> None:
    try:
        with os.fdopen(writer, "wb") as pipe:
            pickle.dump(work(), pipe)
    finally:
        os._exit(0)
