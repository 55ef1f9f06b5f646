"""One child in a session of its own, its output stream, and the guardian that watches it.

The child dies with the supervisor: on Linux the kernel sends it SIGTERM when the supervisor is gone, however
it went, and the guardian sees to everything the child has started. If the terminal is one, the child writes
to a pseudo-terminal, so progress bars show; its bytes arrive as they were written.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

from rollbook.errors import RollbookError
from rollbook.runs.jobs.guardian import Orders, start_guardian

_PR_SET_PDEATHSIG = 1
_MOST_GUARDIANS = 4


class Stream:
    """Where the child writes and the guardian reads."""

    def __init__(self, terminal: int | None) -> None:
        self.is_terminal = terminal is not None
        if terminal is None:
            self.source, self.sink = os.pipe()
            return
        self.source, self.sink = os.openpty()
        attributes = termios.tcgetattr(self.sink)
        attributes[1] &= ~termios.OPOST  # the real terminal adds the carriage returns
        attributes[3] &= ~termios.ECHO
        termios.tcsetattr(self.sink, termios.TCSANOW, attributes)
        self.copy_size(terminal)

    def copy_size(self, terminal: int) -> None:
        with contextlib.suppress(OSError):
            size = fcntl.ioctl(terminal, termios.TIOCGWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
            fcntl.ioctl(self.source, termios.TIOCSWINSZ, size)

    def close_sink(self) -> None:
        if self.sink >= 0:
            os.close(self.sink)
            self.sink = -1

    def close(self) -> None:
        self.close_sink()
        os.close(self.source)


class GuardianLink:
    """The supervisor's end of its guardian: sends it the child's pid, gives back the output."""

    def __init__(self, run_id: str, log: Path, grace_s: float, stream: Stream) -> None:
        self._run_id, self._log, self._grace_s, self._stream = run_id, log, grace_s, stream
        self._child: int | None = None
        self._born = 0
        self._begin()

    def _begin(self) -> None:
        if self._born >= _MOST_GUARDIANS:
            raise RollbookError("the guardian of this run keeps dying; is the machine out of memory?")
        self._born += 1
        ordered, self._control = os.pipe()
        self.output, echoed = os.pipe()
        try:
            self._process = start_guardian(
                Orders(
                    run_id=self._run_id,
                    log=str(self._log),
                    grace_s=self._grace_s,
                    control=ordered,
                    stream=self._stream.source,
                    echo=echoed,
                )
            )
        except OSError as error:
            raise RollbookError(f"the guardian process could not be started: {error}") from error
        finally:
            os.close(ordered)
            os.close(echoed)
        if self._child is not None:
            self.tell_child(self._child)

    def tell_child(self, pid: int) -> None:
        self._child = pid
        self._order(b"child %d\n" % pid)

    def replace_if_dead(self) -> bool:
        """Someone killed it: the next one takes over the same stream."""
        if self._process.poll() is None:
            return False
        os.close(self._control)
        os.close(self.output)
        self._begin()
        return True

    def done(self) -> None:
        self._order(b"done\n")

    def _order(self, order: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._control, order)

    def close(self) -> None:
        """Without `done` before it, this is how a guardian learns that it must end the run."""
        os.close(self._control)
        os.close(self.output)

    def wait(self, timeout_s: float) -> None:
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def start_child(
    command: list[str], stream: Stream, *, cwd: Path | None, env: dict[str, str], stdin: int | None
) -> subprocess.Popen[bytes]:
    """Raises OSError when the command cannot be run."""
    return subprocess.Popen(
        command,
        stdin=stdin,
        stdout=stream.sink,
        stderr=stream.sink,
        cwd=cwd,
        env=env,
        start_new_session=True,
        preexec_fn=_dying_with(os.getpid()),
    )


def _dying_with(supervisor: int) -> Callable[[], None] | None:
    """Runs between fork and exec. The supervisor has a single thread then, so this is safe."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl

    def die_with_supervisor() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != supervisor:  # it died before the kernel was asked
            os._exit(1)

    return die_with_supervisor


def stdin_for_child() -> int | None:
    """Ours (None) if it is a file or a pipe; a terminal of another session would only give errors."""
    try:
        os.fstat(0)
    except OSError:
        return subprocess.DEVNULL
    return subprocess.DEVNULL if os.isatty(0) else None
