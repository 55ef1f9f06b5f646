"""Runs real supervisors over real children, for the tests that kill them.

The child below talks: numbered lines, and after each a note of how far it has come in a file of its own, so a
test can tell what was flushed from what was not. It starts two processes, one in its group and one in a
session of its own (as torchrun does), which leave a sign of life several times a second.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rollbook.runs.jobs.ledger import Ledger, RunRecord

SOURCE = Path(__file__).resolve().parents[1] / "src"

SUPERVISOR = """
import logging, sys
from pathlib import Path
from rollbook.runs.jobs.job import Job
from rollbook.runs.jobs.outcome import exit_code_for
from rollbook.runs.jobs.supervise import supervise
logging.basicConfig()
artifacts, grace, *command = sys.argv[1:]
job = Job(name="demo", command=command, artifacts=Path(artifacts), grace_s=float(grace), sample_every_s=0.5)
sys.exit(exit_code_for(supervise(job)))
"""

TALKER = """
import os, signal, subprocess, sys, time
from pathlib import Path
here, pause, stubborn = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "stubborn"
alive = '''
import os, signal, sys, time
if sys.argv[2] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
sign = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)
while True:
    os.pwrite(sign, b"%d %020.6f" % (os.getpid(), time.monotonic()), 0)
    time.sleep(0.05)
'''
def say_goodbye(number, frame):
    os.write(1, f"goodbye after {signal.Signals(number).name}\\n".encode())
    if not stubborn:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, say_goodbye)
for name, apart in (("in_group", False), ("apart", True)):
    subprocess.Popen([sys.executable, "-c", alive, str(here / name), sys.argv[3]], start_new_session=apart)
said = os.open(here / "said", os.O_CREAT | os.O_WRONLY)
(here / "talker").write_text(f"{os.getpid()} {time.monotonic()}")
number = 0
while True:
    os.write(1, b"line %d\\n" % number)
    os.pwrite(said, b"%d\\n" % number, 0)
    number += 1
    time.sleep(pause)
"""


def poll(what: Callable[[], object], timeout_s: float = 20.0) -> None:
    """Wait until it is true; a machine that is busy gets the time it needs."""
    deadline = time.monotonic() + timeout_s
    while not what():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(0.02)


def start_supervisor(
    artifacts: Path, *command: str, grace_s: float = 1.0, stdout: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """A supervisor in a process group and session of its own, as from a terminal."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    return subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(artifacts), str(grace_s), *command],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        env=environment,
        start_new_session=True,
    )


class Talker:
    """A supervised talking child and the two processes it started."""

    def __init__(
        self, root: Path, *, grace_s: float = 1.0, stubborn: bool = False, pause_s: float = 0.01
    ) -> None:
        self.here = root / "signs"
        self.here.mkdir(parents=True)
        self.artifacts = root / "artifacts"
        self.grace_s = grace_s
        self.pids: dict[str, int] = {}
        self.supervisor = start_supervisor(
            self.artifacts,
            sys.executable,
            "-c",
            TALKER,
            str(self.here),
            str(pause_s),
            "stubborn" if stubborn else "polite",
            grace_s=grace_s,
        )

    def __enter__(self) -> Talker:
        for name in ("talker", "in_group", "apart"):
            poll(partial(self._sign, name))
            if sign := self._sign(name):
                self.pids[name] = sign[0]
        poll(lambda: self.said() >= 5)
        return self

    def __exit__(self, *_: object) -> None:
        for pid in (self.supervisor.pid, *self.pids.values()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.supervisor.wait()

    def _sign(self, name: str) -> tuple[int, float] | None:
        try:
            pid, moment = (self.here / name).read_text().split()
        except (OSError, ValueError):
            return None
        return int(pid), float(moment)

    def said(self) -> int:
        """The number of the last line that was flushed, -1 before the first."""
        try:
            return int((self.here / "said").read_text().split()[0])
        except (OSError, IndexError, ValueError):
            return -1

    def wait_until_gone(self) -> None:
        for pid in self.pids.values():
            poll(partial(is_gone, pid), timeout_s=self.grace_s + 20)

    def last_sign_of_life(self) -> float:
        """The latest moment at which any of its processes was still doing something."""
        signs = [self._sign(name) for name in ("in_group", "apart")]
        return max(sign[1] for sign in signs if sign)

    def record(self) -> RunRecord:
        """What one later command finds in the history."""
        return Ledger(self.artifacts).get("demo")

    def log(self) -> bytes:
        path = Ledger(self.artifacts).get("demo", reconcile=False).log
        assert path is not None
        return (self.artifacts.parent / path).read_bytes()

    def check_log(self) -> None:
        """Every line up to the last one flushed is there, once, in order."""
        numbers = [int(line.split()[1]) for line in self.log().split(b"\n") if line.startswith(b"line ")]
        assert numbers == list(range(len(numbers)))
        assert numbers[-1] >= self.said()


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def is_gone(pid: int) -> bool:
    return not is_alive(pid)
