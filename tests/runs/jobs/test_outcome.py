"""What a return code, a signal and a log add up to."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from rollbook.runs.jobs.ledger import RunEnd, Status
from rollbook.runs.jobs.outcome import exit_code_for, judge, last_error
from rollbook.runs.jobs.processes import OomWatch
from rollbook.runs.jobs.watch import Ended


def judged(
    returncode: int,
    tmp_path: Path,
    *forwarded: signal.Signals,
    killed: bool = False,
    oom: OomWatch | None = None,
) -> RunEnd:
    return judge(Ended(1, returncode, list(forwarded), killed, 0), tmp_path / "log", oom or OomWatch())


@pytest.mark.parametrize(
    ("returncode", "forwarded", "status", "name", "mirrored"),
    [
        (0, [], "completed", None, 0),
        (1, [], "failed", None, 1),
        (255, [], "failed", None, 255),
        (-signal.SIGTERM, [signal.SIGTERM], "interrupted", "SIGTERM", 143),
        (130, [signal.SIGINT], "interrupted", "SIGINT", 130),
        (1, [signal.SIGINT], "interrupted", "SIGINT", 1),
        (0, [signal.SIGTERM], "interrupted", "SIGTERM", 143),
        (-signal.SIGHUP, [], "interrupted", "SIGHUP", 129),
        (143, [], "interrupted", "SIGTERM", 143),
        (-signal.SIGSEGV, [], "failed", "SIGSEGV", 139),
        (-signal.SIGKILL, [], "failed", "SIGKILL", 137),
    ],
)
def test_status(
    tmp_path: Path,
    returncode: int,
    forwarded: list[signal.Signals],
    status: str,
    name: str | None,
    mirrored: int,
) -> None:
    end = judged(returncode, tmp_path, *forwarded)
    assert (end.status, end.signal) == (status, name)
    assert exit_code_for(end) == mirrored


def fake_machine(root: Path, *, version: int, kills: int, machine_kills: int) -> OomWatch:
    proc, groups = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True, exist_ok=True)
    (proc / "vmstat").write_text(f"pgfault 12\noom_kill {machine_kills}\n")
    if version == 2:
        (proc / "self/cgroup").write_text("0::/user/session\n")
        (groups / "user/session").mkdir(parents=True, exist_ok=True)
        (groups / "user/session/memory.events").write_text(f"low 0\noom {kills}\noom_kill {kills}\n")
    else:
        (proc / "self/cgroup").write_text("5:cpu:/\n4:memory:/job\n0::/\n")
        (groups / "memory/job").mkdir(parents=True, exist_ok=True)
        (groups / "memory/job/memory.oom_control").write_text(f"under_oom 0\noom_kill {kills}\n")
    return OomWatch(groups, proc)


@pytest.mark.parametrize("version", [1, 2])
def test_an_out_of_memory_kill_of_the_control_group_is_recognised(tmp_path: Path, version: int) -> None:
    watch = fake_machine(tmp_path, version=version, kills=3, machine_kills=3)
    assert judged(-signal.SIGKILL, tmp_path, oom=watch).oom is None
    fake_machine(tmp_path, version=version, kills=4, machine_kills=4)
    end = judged(-signal.SIGKILL, tmp_path, oom=watch)
    assert (end.status, end.oom, end.reason) == ("failed", True, "out of memory: killed by the kernel")
    worker = judged(1, tmp_path, oom=watch)
    assert (worker.oom, worker.reason) == (True, "out of memory: the kernel killed one of its processes")
    assert judged(0, tmp_path, oom=watch).status == Status.COMPLETED


def test_a_kill_elsewhere_on_the_machine_is_only_likely(tmp_path: Path) -> None:
    watch = fake_machine(tmp_path, version=2, kills=0, machine_kills=0)
    fake_machine(tmp_path, version=2, kills=0, machine_kills=1)
    assert "very likely" in str(judged(-signal.SIGKILL, tmp_path, oom=watch).reason)
    assert judged(1, tmp_path, oom=watch).oom is None


def test_without_any_counters_a_kill_is_just_a_kill(tmp_path: Path) -> None:
    end = judged(-signal.SIGKILL, tmp_path, oom=OomWatch(tmp_path / "no", tmp_path / "none"))
    assert (end.oom, end.reason) == (None, "killed by SIGKILL (likely out of memory or kill -9)")


TORCHRUN = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 3, in <module>
[rank1]:     main()
[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB
E1116 00:00:00.0 torchelastic failed (exitcode: 1) local_rank: 1
Traceback (most recent call last):
  File "/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
"""
GROUP = """\
  + Exception Group Traceback (most recent call last):
  |   File "x.py", line 1, in <module>
  | ExceptionGroup: two (1 sub-exception)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "x.py", line 2, in f
    | OSError: disk
    +------------------------------------
"""
CHAINED = """\
Traceback (most recent call last):
  File "a.py", line 1, in f
KeyError: 'x'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 2, in g
\x1b[31mmy.module.ConfigError\x1b[0m: no such key: x
try another
"""


@pytest.mark.parametrize(
    ("log", "error"),
    [
        (
            TORCHRUN,
            {
                "type": "torch.OutOfMemoryError",
                "message": "CUDA out of memory. Tried to allocate 2.00 GiB",
                "rank": 1,
                "last_line": "train.py FAILED",
            },
        ),
        (GROUP, {"type": "OSError", "message": "disk", "last_line": "+------------------------------------"}),
        (
            CHAINED,
            {"type": "my.module.ConfigError", "message": "no such key: x", "last_line": "try another"},
        ),
        ("fine\nerror: no space\n\n", {"message": "error: no space", "last_line": "error: no space"}),
        (
            "Traceback (most recent call last):\n  File x\nKeyboardInterrupt\n",
            {"type": "KeyboardInterrupt", "message": "", "last_line": "KeyboardInterrupt"},
        ),
        (
            "Traceback (most recent call last):\n  File x, cut",
            {"message": "File x, cut", "last_line": "File x, cut"},
        ),
        ("\n[rollbook] ours\n", None),
        ("", None),
    ],
)
def test_the_line_that_says_why(tmp_path: Path, log: str, error: dict[str, object] | None) -> None:
    (tmp_path / "log").write_text(log)
    assert last_error(tmp_path / "log") == error


def test_only_the_end_of_a_huge_log_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        file.seek(5 << 30)
        file.write(os.urandom(100).replace(b"\n", b"") + b"\nValueError\xff\n")
    error = last_error(log)
    assert error is not None
    assert error["last_line"] == "ValueError\ufffd"
