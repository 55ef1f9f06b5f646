"""Which processes belong to a run, whether one still lives, and what killed one.

A process is known by its pid together with its start time and the boot it lives in, because pids are used
again. The processes of a run are found by its process group and session, by descent, and by the run's id in
their environment: torchrun gives every worker a session of its own, so a signal to the group alone would
leave them on the GPUs. Everything is read from /proc; where there is none (macOS) the group has to do.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

RUN_ID_VARIABLE = "ROLLBOOK_RUN_ID"
GUARDIAN_VARIABLE = "ROLLBOOK_GUARDIAN"  # marks the process that ends the others, which must not be ended

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
HAS_PROC = (_PROC / "self/stat").exists()


class ProcessIdentity(msgspec.Struct, frozen=True, omit_defaults=True):
    """A process for good: what is None could not be known on this system."""

    pid: int
    start_ticks: int | None = None
    boot_id: str | None = None
    pid_namespace: str | None = None


class Stat(NamedTuple):
    pid: int
    state: str
    parent: int
    group: int
    session: int
    cpu_ticks: int
    start_ticks: int
    rss_pages: int


def read_stat(pid: int) -> Stat | None:
    """None when there is no such process."""
    try:
        # Not through pathlib: a look at a whole machine calls this thousands of times.
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            text = os.read(descriptor, 4096)
        finally:
            os.close(descriptor)
    except OSError:
        return None
    # The command name, in parentheses, may itself hold spaces and parentheses.
    fields = text[text.rfind(b")") + 2 :].split()
    if len(fields) < 22:
        return None
    return Stat(
        pid=pid,
        state=fields[0].decode(),
        parent=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        start_ticks=int(fields[19]),
        rss_pages=int(fields[21]),
    )


def all_stats() -> Iterator[Stat]:
    if not HAS_PROC:
        return
    for name in os.listdir(_PROC):  # noqa: PTH208 - iterdir would build a Path a process
        if name.isdigit() and (stat := read_stat(int(name))):
            yield stat


def boot_id() -> str | None:
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def boot_time() -> float | None:
    """When this machine was started, as a Unix time."""
    try:
        return time.time() - float((_PROC / "uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None


def started_at(pid: int) -> float | None:
    """When a process was started, as a Unix time, to the second or so."""
    stat, booted = read_stat(pid), boot_time()
    if stat is None or booted is None:
        return None
    return booted + stat.start_ticks / os.sysconf("SC_CLK_TCK")


def _pid_namespace() -> str | None:
    try:
        return os.readlink(_PROC / "self/ns/pid")  # noqa: PTH115 - the link names no file
    except OSError:
        return None


def identify(pid: int | None = None) -> ProcessIdentity:
    pid = os.getpid() if pid is None else pid
    stat = read_stat(pid)
    return ProcessIdentity(pid, stat.start_ticks if stat else None, boot_id(), _pid_namespace())


def is_visible(process: ProcessIdentity) -> bool:
    """Whether its pid means anything here: a container's pids are its own."""
    return process.pid_namespace is None or process.pid_namespace == _pid_namespace()


def why_gone(process: ProcessIdentity) -> str | None:
    """Why a process of this machine is no longer there; None while it lives."""
    if process.boot_id and process.boot_id != boot_id():
        return f"the machine was restarted while pid {process.pid} was running"
    if not HAS_PROC:
        return None if _answers(process.pid) else f"its process (pid {process.pid}) is gone"
    stat = read_stat(process.pid)
    if stat is None or stat.state in "ZX":
        return f"its process (pid {process.pid}) is gone"
    if process.start_ticks is not None and stat.start_ticks != process.start_ticks:
        return f"its process is gone; pid {process.pid} is another one now"
    return None


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return error.errno == errno.EPERM
    return True


class RunProcesses:
    """The processes of one run. `group` is the pid of its first child, which leads a session of its own."""

    def __init__(self, run_id: str, group: int | None) -> None:
        self.group = group
        self._mark = f"{RUN_ID_VARIABLE}={run_id}".encode()

    def pids(self) -> list[int]:
        """The processes alive now, without the caller and without guardians; zombies no longer count."""
        if not HAS_PROC:
            return [self.group] if self.group and _group_answers(self.group) else []
        stats = {stat.pid: stat for stat in all_stats()}
        below = descendants(stats, self.group) if self.group else set()
        return [
            pid
            for pid, stat in stats.items()
            if stat.state not in "ZX" and pid != os.getpid() and self._belongs(stat, below)
        ]

    def _belongs(self, stat: Stat, below: set[int]) -> bool:
        ours = stat.pid in below or (self.group is not None and self.group in (stat.group, stat.session))
        environment = _environment(stat.pid)
        return (ours or self._mark in environment) and _GUARDIAN_MARK not in environment

    def signal(self, number: int, *, but: int | None = None) -> list[int]:
        """Send the signal to each of them; returns those that got it."""
        reached = []
        for pid in self.pids():
            if pid != but:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    if HAS_PROC:
                        os.kill(pid, number)
                    else:
                        os.killpg(pid, number)
                    reached.append(pid)
        return reached

    def signal_group(self, number: int) -> None:
        if self.group is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.group, number)
            if number != signal.SIGKILL:  # a stopped process would never see it
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.group, signal.SIGCONT)


_GUARDIAN_MARK = f"{GUARDIAN_VARIABLE}=1".encode()


def descendants(stats: dict[int, Stat], root: int) -> set[int]:
    children: dict[int, list[int]] = {}
    for stat in stats.values():
        children.setdefault(stat.parent, []).append(stat.pid)
    found: set[int] = set()
    waiting = [root]
    while waiting:
        for pid in children.get(waiting.pop(), ()):
            if pid not in found:
                found.add(pid)
                waiting.append(pid)
    return found


def _environment(pid: int) -> list[bytes]:
    try:
        return (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _group_answers(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except OSError as error:
        return error.errno == errno.EPERM
    return True


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
