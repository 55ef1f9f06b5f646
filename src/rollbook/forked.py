"""Work on another core, in a copy of this process: it has all that this one has, and hashes as it does.

For work that holds the interpreter's lock, which threads cannot share. The copy must run nothing but plain
computation and files of its own: of the threads of this process it has none, and their locks may be held.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Generic, TypeVar

T = TypeVar("T")
_MOST_PROCESSES = 4
_TICKET_BYTES = 2
_MOST_TICKETS = 4096  # fit into any pipe; of more pieces, each stands for several
_DONE = b"d"
_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


def cores() -> int:
    """That copies of this process can use: one where it cannot be copied."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1


def die_with(parent: int) -> bool:
    """Be killed when the process that made this one ends; False if it has ended already.

    Only Linux can be asked for this.
    """
    if sys.platform == "linux":
        with suppress(ImportError, OSError, AttributeError):
            import ctypes

            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return os.getppid() == parent


class InACopy(Generic[T]):
    """Begins at once. Where processes cannot be copied safely, the work is done here when it is asked for."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._pid: int | None = None
        if sys.platform == "linux":
            # There may be as many processes as there can be; and some Pythons know no memfd_create.
            with suppress(OSError, AttributeError):
                self._begin()

    def _begin(self) -> None:
        with ExitStack() as undo:
            self._answer = os.memfd_create("rollbook")  # megabytes, which a pipe takes ten times as long for
            undo.callback(os.close, self._answer)
            self._end, writer = os.pipe()
            undo.callback(os.close, self._end)
            undo.callback(os.close, writer)
            maker, pid = os.getpid(), os.fork()
            if pid == 0:
                os.close(self._end)
                _answer(self._work, maker, self._answer, writer)
            os.close(writer)
            self._pid = pid
            undo.pop_all()

    def result(self) -> T:
        """If the copy was killed, or met an error, the work is done here, and the error met here."""
        if self._pid is None:
            return self._work()
        try:
            if os.read(self._end, 1) != _DONE:
                return self._work()
            os.lseek(self._answer, 0, os.SEEK_SET)
            with os.fdopen(self._answer, "rb", closefd=False) as file:
                done: T = pickle.load(file)
        finally:
            self.close()
        return done

    def close(self) -> None:
        """Let go of it, whether it is done or not."""
        if self._pid is not None:
            with suppress(
                ProcessLookupError, ChildProcessError
            ):  # whoever called us may have it reaped at once
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
            os.close(self._end)
            os.close(self._answer)
            self._pid = None


class SharedWork(Generic[T]):
    """Numbered pieces of work: copies begin with them at once, and this process helps when it is asked."""

    def __init__(self, work: Callable[[int], T], count: int, *, copies: int | None = None) -> None:
        """As many copies as there are cores besides this one's, up to a few, unless it is said otherwise."""
        self._work, self._count = work, count
        self._tickets = min(count, _MOST_TICKETS)
        self._queue = _queue(self._tickets)
        self._is_open = True
        wanted = min(cores(), _MOST_PROCESSES, count) - 1 if copies is None else copies
        self._copies = [InACopy(self._take) for _ in range(wanted)]

    def result(self) -> list[T]:
        """Of all pieces, in their order; what a copy that was killed had taken is done here.

        Of several that meet an error, it is the first one's.
        """
        try:
            done = self._take()
            for copy in self._copies:
                done |= copy.result()
        finally:
            self.close()
        return [done[number] if number in done else self._work(number) for number in range(self._count)]

    def close(self) -> None:
        """Let go of it, whether it is done or not."""
        for copy in self._copies:
            copy.close()
        if self._is_open:
            os.close(self._queue)
            self._is_open = False

    def _take(self) -> dict[int, T]:
        """The pieces that nobody else takes, until there are none."""
        done: dict[int, T] = {}
        with suppress(Exception):  # to be met again, in the order of the pieces
            while ticket := os.read(self._queue, _TICKET_BYTES):
                for number in range(int.from_bytes(ticket), self._count, self._tickets):
                    done[number] = self._work(number)
        return done


def _queue(count: int) -> int:
    """A pipe with that many tickets: whoever reads one has taken it, and nobody else can."""
    reader, writer = os.pipe()
    os.write(writer, b"".join(number.to_bytes(_TICKET_BYTES) for number in range(count)))
    os.close(writer)
    return reader


def _answer(work: Callable[[], T], maker: int, answer: int, writer: int) -> None:
    try:
        if not die_with(maker):
            return
        with os.fdopen(answer, "wb") as file:
            pickle.dump(work(), file)
        os.write(writer, _DONE)
    finally:
        os._exit(0)
