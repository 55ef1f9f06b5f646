"""The process that outlives the supervisor for as long as the run's own processes do, and not longer.

It sits in a session of its own, reads the child's output and writes the log, and hands a copy to the
supervisor for the terminal. So a supervisor that is killed, even with SIGKILL and its whole group, costs
not a byte of the log; the guardian sees its pipe close, sends SIGTERM to every process of the run, SIGKILL
after the grace period, logs the rest of their output, and exits. It writes nothing but the log:
the history is the business of the next command that reads it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from rollbook.records.line_secrets import StreamSecrets
from rollbook.runs.children import python_command, python_environment
from rollbook.runs.jobs.console import CarriageReturns
from rollbook.runs.jobs.processes import GUARDIAN_VARIABLE, RUN_ID_VARIABLE, RunProcesses

_CHUNK = 1 << 16
_TURN_S = 0.1
_GIVE_UP_AFTER_KILL_S = 30.0  # a process in an uninterruptible wait cannot be helped from here
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE, signal.SIGTSTP)
_CLOSING_LINE = b"[rollbook] the supervisor of this run is gone; its processes were ended\n"


class Orders(msgspec.Struct):
    """What a guardian is born with; the numbers are descriptors it inherits."""

    run_id: str
    log: str
    grace_s: float
    control: int  # from the supervisor: `child PID`, `done`; closed without `done` when it dies
    stream: int  # the child's output
    echo: int  # to the supervisor: the same bytes, for the terminal


def start_guardian(orders: Orders) -> subprocess.Popen[bytes]:
    environment = {key: value for key, value in os.environ.items() if key != RUN_ID_VARIABLE}
    environment[GUARDIAN_VARIABLE] = "1"
    return subprocess.Popen(
        python_command("rollbook.runs.jobs.guardian", msgspec.json.encode(orders).decode()),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env=python_environment(environment),
        pass_fds=(orders.control, orders.stream, orders.echo),
        start_new_session=True,
    )


class Guardian:
    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._log = LogFile(Path(orders.log))
        self._child: int | None = None
        self._partial_order = b""  # an order that has not fully arrived
        self._done = False
        self._stream_open = True
        self._stream_idle = False  # nothing more to read right now
        self._echo_open = True
        self._unsent = b""
        self._sweep: Sweep | None = None
        os.set_blocking(orders.echo, False)

    def watch(self) -> None:
        while not self._is_over():
            self._turn()
        self._log.finish(_CLOSING_LINE if self._sweep else b"")

    def _is_over(self) -> bool:
        drained = not self._stream_open or self._stream_idle
        if self._sweep:
            return self._sweep.over and drained
        return self._done and drained and not self._unsent

    def _turn(self) -> None:
        supervised = not self._done and not self._sweep
        reads = [self._orders.control] if supervised else []
        if self._stream_open and len(self._unsent) < _CHUNK:
            reads.append(self._orders.stream)
        writes = [self._orders.echo] if self._unsent else []
        readable, writable, _ = select.select(reads, writes, [], None if supervised else _TURN_S)
        if writable:
            self._send()
        self._stream_idle = self._orders.stream not in readable and self._orders.stream in reads
        if self._orders.stream in readable:
            self._read_stream()
        if self._orders.control in readable:
            self._listen()
        if self._sweep and not self._sweep.over:
            self._sweep.turn()
            self._stream_idle = False  # the last process may have written since we looked
        elif not self._stream_open and not self._unsent:
            self._close_echo()

    def _listen(self) -> None:
        received = os.read(self._orders.control, 4096)
        if not received:
            self._close_echo()
            self._unsent = b""
            self._sweep = Sweep(RunProcesses(self._orders.run_id, self._child), self._orders.grace_s)
            return
        *orders, self._partial_order = (self._partial_order + received).split(b"\n")
        for order in orders:
            word, _, value = order.partition(b" ")
            if word == b"child":
                self._child = int(value)
            elif word == b"done":
                self._done = True
                self._stream_idle = False  # what was written before the order is still to be read

    def _read_stream(self) -> None:
        try:
            data = os.read(self._orders.stream, _CHUNK)
        except BlockingIOError:
            return
        except OSError:  # a pseudo-terminal whose last writer has gone
            data = b""
        if not data:
            self._stream_open = False
            return
        self._log.write(data)
        if self._echo_open:
            self._unsent += data
            self._send()

    def _send(self) -> None:
        try:
            self._unsent = self._unsent[os.write(self._orders.echo, self._unsent) :]
        except BlockingIOError:
            return
        except OSError:
            self._close_echo()
            self._unsent = b""

    def _close_echo(self) -> None:
        if self._echo_open:
            self._echo_open = False
            os.close(self._orders.echo)


class LogFile:
    """The log, without the values of secrets.

    A full disk costs lines, which are counted, and never stops the run.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(path, flags, 0o666)
        self._returns, self._secrets = CarriageReturns(), StreamSecrets()
        self._lost = 0

    def write(self, data: bytes) -> None:
        self._put(self._secrets.feed(self._returns.feed(data)))

    def finish(self, closing_line: bytes) -> None:
        self._put(self._secrets.feed(self._returns.finish()) + self._secrets.finish())
        if self._lost:
            self._put(f"[rollbook] {self._lost} bytes of output could not be written here\n".encode())
        self._put(closing_line)
        with contextlib.suppress(OSError):
            os.fsync(self._descriptor)
        os.close(self._descriptor)

    def _put(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except OSError:
                self._lost += len(data)
                return


class Sweep:
    """Ends every process of a run: SIGTERM, the grace period, SIGKILL until none is left."""

    def __init__(self, processes: RunProcesses, grace_s: float) -> None:
        self.over = False
        self._processes = processes
        self._kill_at = time.monotonic() + grace_s
        # On Linux the kernel has sent the child its SIGTERM when the supervisor died; one is enough.
        processes.signal(signal.SIGTERM, but=processes.group if sys.platform == "linux" else None)

    def turn(self) -> None:
        late = time.monotonic() - self._kill_at
        if late >= 0:
            self._processes.signal(signal.SIGKILL)
        self.over = not self._processes.pids() or late > _GIVE_UP_AFTER_KILL_S


def main() -> None:
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    Guardian(msgspec.json.decode(sys.argv[1], type=Orders)).watch()


if __name__ == "__main__":
    main()
