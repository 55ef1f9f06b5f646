"""From a child's start to the end of its last process: output, signals, deadlines, leftovers.

A child that exits may leave processes behind (an upload that finishes, a server nobody stopped). They get the
grace period to end by themselves, then SIGTERM, then SIGKILL: when a run has ended, its GPUs are free.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable
from typing import NamedTuple

from rollbook.runs.jobs.child import GuardianLink, Stream
from rollbook.runs.jobs.processes import RunProcesses
from rollbook.runs.jobs.signals import SignalQueue

_CHUNK = 1 << 16
_TERMINAL_CHUNK = 4096  # a pipe or terminal that `select` calls writable takes this much without blocking
_LOOK_S = 0.2
_PATIENCE_S = 1.0
_DOUBLE_CTRL_C_S = 0.5  # a terminal and a wrapper such as `uv run` both deliver one Ctrl-C
_KILL_WAIT_S = 5.0  # for a terminal that has stalled, for a process that cannot be killed
_NEVER = float("inf")


class Ended(NamedTuple):
    """What the supervisor saw. `returncode` is negative for a signal, as `subprocess` has it."""

    pid: int
    returncode: int
    forwarded: list[signal.Signals]  # before the child ended, in the order they came
    killed_here: bool  # our own SIGKILL, after the grace period
    leftovers: int  # processes that had to be ended after the child


class Watch:
    def __init__(
        self,
        child: subprocess.Popen[bytes],
        run_id: str,
        stream: Stream,
        guardian: GuardianLink,
        signals: SignalQueue,
        *,
        terminal: int | None,
        grace_s: float,
        every_turn: Callable[[], None],
    ) -> None:
        self._child, self._stream, self._guardian, self._signals = child, stream, guardian, signals
        self._terminal, self._grace_s, self._every_turn = terminal, grace_s, every_turn
        self.processes = RunProcesses(run_id, child.pid)
        self._output_open = True
        self._unshown = b""
        self._first_sent: dict[signal.Signals, float] = {}
        self._forwarded: list[signal.Signals] = []
        self._kill_at = self._term_at = _NEVER
        self._killed_here = False
        self._gone_at: float | None = None
        self._next_look = 0.0
        self._leftovers = 0
        self._over = False

    def until_over(self) -> Ended:
        while not self._over:
            self._forward_signals()
            self._move_output(self._wait_s())
            self._every_turn()
            if self._guardian.replace_if_dead():
                self._output_open = True
            if self._child_is_gone():
                self._end_remaining_processes()
            elif time.monotonic() >= self._kill_at:
                self._killed_here = True
                self.processes.signal(signal.SIGKILL)
        self._guardian.done()
        self._show_the_rest()
        returncode = self._child.wait()
        return Ended(self._child.pid, returncode, self._forwarded, self._killed_here, self._leftovers)

    def _forward_signals(self) -> None:
        if self._signals.resized and self._terminal is not None and self._stream.is_terminal:
            self._signals.resized = False
            self._stream.copy_size(self._terminal)
        for arrival in self._signals.take():
            number = arrival.signal
            first = self._first_sent.setdefault(number, arrival.at)
            if first == arrival.at:
                self.processes.signal_group(number)
                self._kill_at = min(self._kill_at, arrival.at + self._grace_s)
                self._term_at = min(self._term_at, arrival.at)
                if self._gone_at is None:
                    self._forwarded.append(number)
            elif arrival.at - first > _DOUBLE_CTRL_C_S:
                self._kill_at = min(self._kill_at, arrival.at)

    def _wait_s(self) -> float:
        if self._gone_at is not None:
            return _LOOK_S
        return max(0.0, min(_PATIENCE_S, self._kill_at - time.monotonic() + 0.01))

    def _move_output(self, patience_s: float) -> None:
        reads = [self._signals.descriptor]
        if self._output_open and len(self._unshown) < _CHUNK:
            reads.append(self._guardian.output)
        writes = [self._terminal] if self._unshown and self._terminal is not None else []
        readable, writable, _ = select.select(reads, writes, [], patience_s)
        if self._signals.descriptor in readable:
            self._signals.drain()
        if self._guardian.output in readable:
            data = os.read(self._guardian.output, _CHUNK)
            self._output_open = bool(data)
            if self._terminal is not None:
                self._unshown += data
        if writable and self._terminal is not None:
            try:
                shown = os.write(self._terminal, self._unshown[:_TERMINAL_CHUNK])
                self._unshown = self._unshown[shown:]
            except OSError:  # the terminal is gone; the log is not
                self._terminal, self._unshown = None, b""

    def _child_is_gone(self) -> bool:
        if self._gone_at is None:
            # The child stays a zombie until all is done, so its pid cannot come to mean another group.
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            if os.waitid(os.P_PID, self._child.pid, options) is None:
                return False
            self._gone_at = time.monotonic()
            self._term_at = min(self._term_at, self._gone_at + self._grace_s)
        return True

    def _end_remaining_processes(self) -> None:
        now = time.monotonic()
        if now < self._next_look and self._output_open:
            return
        self._next_look = now + _LOOK_S
        left = self.processes.pids()
        waited = now - (self._gone_at or now)
        if not left:
            self._over = not self._output_open or waited > self._grace_s
        elif now >= self._kill_at:
            self.processes.signal(signal.SIGKILL)
            self._over = now > self._kill_at + _KILL_WAIT_S
        elif now >= self._term_at and not self._leftovers:
            self._leftovers = len(left)
            self.processes.signal(signal.SIGTERM)
            self._kill_at = min(self._kill_at, now + self._grace_s)

    def _show_the_rest(self) -> None:
        deadline = time.monotonic() + _KILL_WAIT_S
        while (self._output_open or self._unshown) and time.monotonic() < deadline:
            self._move_output(_LOOK_S)
