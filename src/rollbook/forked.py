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
_NUMBER_BYTES = 2
MOST_PIECES = 16_384  # their numbers all fit into a pipe
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


class SharedWork(Generic[T]):
    """Numbered pieces of work: copies begin with them at once, and this process helps when it is asked."""

    def __init__(self, work: Callable[[int], T], count: int, copies: int) -> None:
        self._work, self._count = work, count
        self._queue: int | None = _queue(count)
        self._copies = [InACopy(self._take) for _ in range(copies)]

    def result(self) -> list[T]:
        """Of all pieces, in their order; what a copy that was killed had taken is done here."""
        done = self._take()
        for copy in self._copies:
            done |= copy.result()
        self.close()
        return [done[number] if number in done else self._work(number) for number in range(self._count)]

    def close(self) -> None:
        """Let go of it, whether it is done or not."""
        for copy in self._copies:
            copy.close()
        if self._queue is not None:
            os.close(self._queue)
            self._queue = None

    def _take(self) -> dict[int, T]:
        """The pieces that nobody else takes, until there are none."""
        done: dict[int, T] = {}
        while self._queue is not None and (taken := os.read(self._queue, _NUMBER_BYTES)):
            number = int.from_bytes(taken)
            done[number] = self._work(number)
        return done


def _queue(count: int) -> int:
    """A pipe with the number of every piece: whoever reads one has taken it, and nobody else can."""
    reader, writer = os.pipe()
    os.write(writer, b"".join(number.to_bytes(_NUMBER_BYTES) for number in range(count)))
    os.close(writer)
    return reader


def _send(work: Callable[[], T], writer: int) -> None:
    try:
        with os.fdopen(writer, "wb") as pipe:
            pickle.dump(work(), pipe)
    finally:
        os._exit(0)
