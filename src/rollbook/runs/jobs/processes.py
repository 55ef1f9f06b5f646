"""Which processes belong to a run, whether one still lives, and what killed one.

A process is known by its pid together with its start time and the boot it lives in, because pids are used
again. The processes of a run are found by its process group and session, by descent, and by the run's id in
their environment: torchrun gives every worker a session of its own, so a signal to the group alone would
leave them on the GPUs. psutil reads all this; what it does not know (the boot's id, the namespace of pids,
out-of-memory kills) is read from /proc where there is one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import sys
import time
from pathlib import Path

import msgspec
import psutil

RUN_ID_VARIABLE = "ROLLBOOK_RUN_ID"
GUARDIAN_VARIABLE = "ROLLBOOK_GUARDIAN"  # marks the process that ends the others, which must not be ended

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


class ProcessIdentity(msgspec.Struct, frozen=True, omit_defaults=True):
    """A process for good: what is None could not be known on this system."""

    pid: int
    start_ticks: int | None = None  # since the boot
    boot_id: str | None = None
    pid_namespace: str | None = None


def boot_id() -> str | None:
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def started_at(pid: int) -> float | None:
    """When a process was started, as a Unix time, to the second or so."""
    try:
        return psutil.Process(pid).create_time()
    except (psutil.Error, ValueError):
        return None


def _start_ticks(pid: int) -> int | None:
    """When a process was started, in clock ticks since the boot, which no change of the clock moves.

    None where there is no such process, and on systems that keep the time of day instead.
    """
    if sys.platform != "linux":
        return None
    while True:
        booted, started = psutil.boot_time(), started_at(pid)
        if started is None:
            return None
        if booted == psutil.boot_time():  # the clock was not set between the two
            return round((started - booted) * os.sysconf("SC_CLK_TCK"))


def _pid_namespace() -> str | None:
    try:
        return os.readlink(_PROC / "self/ns/pid")  # noqa: PTH115 - the link names no file
    except OSError:
        return None


def identify(pid: int | None = None) -> ProcessIdentity:
    pid = os.getpid() if pid is None else pid
    return ProcessIdentity(pid, _start_ticks(pid), boot_id(), _pid_namespace())


def is_visible(process: ProcessIdentity) -> bool:
    """Whether its pid means anything here: a container's pids are its own."""
    return process.pid_namespace is None or process.pid_namespace == _pid_namespace()


def why_gone(process: ProcessIdentity) -> str | None:
    """Why a process of this machine is no longer there; None while it lives."""
    if process.boot_id and process.boot_id != boot_id():
        return f"the machine was restarted while pid {process.pid} was running"
    gone = f"its process (pid {process.pid}) is gone"
    try:
        if psutil.Process(process.pid).status() in _ENDED:
            return gone
    except (psutil.Error, ValueError):  # another user's may be hidden from us
        return None if _answers(process.pid) else gone
    if process.start_ticks is not None and _start_ticks(process.pid) != process.start_ticks:
        return f"its process is gone; pid {process.pid} is another one now"
    return None


def send(process: ProcessIdentity, number: int) -> str | None:
    """Signal this very process, or say why nothing was sent: it is gone, or its pid may be another's by now.

    OSError where the system refuses.
    """
    if sys.platform == "linux" and process.start_ticks is None:
        return f"nobody knows when pid {process.pid} was started, so it may be another process by now"
    if not hasattr(os, "pidfd_open"):
        if (why := why_gone(process)) is None:
            os.kill(process.pid, number)
        return why
    try:
        descriptor = os.pidfd_open(process.pid)  # stays with the process that is looked at next
    except ProcessLookupError:
        return why_gone(process) or f"its process (pid {process.pid}) is gone"
    try:
        if (why := why_gone(process)) is None:
            signal.pidfd_send_signal(descriptor, number)
        return why
    except ProcessLookupError:
        return f"its process (pid {process.pid}) is gone"
    finally:
        os.close(descriptor)


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (OSError, OverflowError) as error:
        return getattr(error, "errno", None) == errno.EPERM
    return pid > 0


def tree_of(root: int) -> set[int]:
    """Pids of a process, of those below it, and of those in the session (so also the group) that it leads."""
    found = {root}
    with contextlib.suppress(psutil.Error):
        found.update(child.pid for child in psutil.Process(root).children(recursive=True))
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            if os.getsid(pid) == root:
                found.add(pid)
    return found


class RunProcesses:
    """The processes of one run. `group` is the pid of its first child, which leads a session of its own."""

    def __init__(self, run_id: str, group: int | None) -> None:
        self.group, self._run_id = group, run_id

    def pids(self) -> list[int]:
        """The processes alive now, without the caller and without guardians; zombies no longer count."""
        tree = tree_of(self.group) if self.group else set()
        return [
            process.pid
            for process in psutil.process_iter()
            if process.pid != os.getpid() and self._has(process, process.pid in tree)
        ]

    def _has(self, process: psutil.Process, is_below: bool) -> bool:
        try:
            environment = process.as_dict(["environ"], ad_value={})["environ"]
            is_ours = is_below or environment.get(RUN_ID_VARIABLE) == self._run_id
            return is_ours and environment.get(GUARDIAN_VARIABLE) != "1" and process.status() not in _ENDED
        except (psutil.Error, OSError):
            return False

    def signal(self, number: int, *, but: int | None = None) -> list[int]:
        """Send the signal to each of them; returns those that got it."""
        reached = []
        for pid in self.pids():
            if pid != but:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
                    reached.append(pid)
        return reached

    def signal_group(self, number: int) -> None:
        if self.group is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.group, number)
            if number != signal.SIGKILL:  # a stopped process would never see it
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.group, signal.SIGCONT)


class OomWatch:
    """Notices that the kernel's out-of-memory killer was at work between its construction and a look."""

    def __init__(self, cgroups: Path = _CGROUPS, proc: Path = _PROC) -> None:
        self._counters = _memory_events(cgroups, proc)
        self._machine = proc / "vmstat"
        self._before = {path: _counter(path) for path in (*self._counters, self._machine)}
        self._since = time.clock_gettime(time.CLOCK_MONOTONIC)

    def kills(self) -> int:
        """Kills in our own control group: of a process of this run, or of the shell that started it."""
        return sum(map(self._new, self._counters))

    def kills_on_machine(self) -> int:
        return self._new(self._machine)

    def _new(self, path: Path) -> int:
        before, now = self._before[path], _counter(path)
        return 0 if before is None or now is None else max(0, now - before)

    def kernel_named(self, pid: int) -> bool:
        """Whether the kernel log, where we may read it, says that this very process was killed."""
        return pid in killed_in_kernel_log(self._since)


def _memory_events(cgroups: Path, proc: Path) -> list[Path]:
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        inside = name.lstrip("/")
        if controllers == "":
            candidates = [cgroups / inside / "memory.events", cgroups / "memory.events"]
        elif "memory" in controllers.split(","):
            # Inside a container the name is the host's, while the mount shows our own group at its root.
            candidates = [
                cgroups / "memory" / inside / "memory.oom_control",
                cgroups / "memory/memory.oom_control",
            ]
        else:
            continue
        found += [path for path in candidates if path.exists()][:1]
    return found


def _counter(path: Path) -> int | None:
    try:
        for line in path.read_bytes().splitlines():
            words = line.split()
            if len(words) == 2 and words[0] == b"oom_kill":
                return int(words[1])
    except (OSError, ValueError):
        return None
    return None


_KILLED = re.compile(rb"Killed process (\d+)")


def killed_in_kernel_log(since: float) -> set[int]:
    """The pids of /dev/kmsg's out-of-memory kills after a moment of CLOCK_MONOTONIC."""
    found: set[int] = set()
    try:
        descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return found
    try:
        while True:
            try:
                entry = os.read(descriptor, 8192)
            except BrokenPipeError:  # this entry was overwritten while we read; the next is fine
                continue
            except OSError:
                return found
            head, _, text = entry.partition(b";")
            fields = head.split(b",")
            recent = len(fields) > 2 and fields[2].isdigit() and int(fields[2]) / 1e6 >= since - 1
            if recent and (match := _KILLED.search(text)):
                found.add(int(match[1]))
    finally:
        os.close(descriptor)
