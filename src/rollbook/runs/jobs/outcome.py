"""From how a process ended to what the history says about it.

`completed` is an exit with 0 that nobody asked for. Whatever follows a forwarded INT, TERM or HUP is
`interrupted`, also an exit with 0: a run that was told to stop did not finish. Everything else is `failed`,
with the line that says why: the last line of the last traceback, of the rank that failed first if torchrun
put its own on top, or else the last line of the log.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

from rollbook.runs.jobs.ledger import RunEnd, Status
from rollbook.runs.jobs.processes import OomWatch
from rollbook.runs.jobs.signals import STOP_SIGNALS
from rollbook.runs.jobs.watch import Ended

NOT_FOUND, NOT_EXECUTABLE = 127, 126

_TAIL = 1 << 17
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[@-Z\\-_]|\][^\x07\x1b]*(?:\x07|\x1b\\)?)")
_TRACEBACK = "Traceback (most recent call last):"
_EXCEPTION = re.compile(r"([A-Za-z_][\w.]*)(?::\s*(.*))?")
_NAMED_ERROR = re.compile(r"(?:[\w.]+(?:Error|Exception)|[Ee]rror|ERROR|fatal)\b.*:")
_WRAPPERS = ("ChildFailedError",)  # says only that some rank failed


def judge(ended: Ended, log: Path, oom: OomWatch) -> RunEnd:
    code = ended.returncode if ended.returncode >= 0 else 128 - ended.returncode
    number = _signal_of(ended.returncode)
    if ended.forwarded:
        cause = ended.forwarded[0]
        end = RunEnd(status=Status.INTERRUPTED, exit_code=code, signal=cause.name)
        end.reason = f"stopped by {cause.name}"
        if ended.killed_here:
            end.reason += "; it did not end within the grace period and was killed"
        return end
    if ended.returncode == 0:
        return RunEnd(status=Status.COMPLETED, exit_code=0)
    if number in STOP_SIGNALS:
        return RunEnd(
            status=Status.INTERRUPTED, exit_code=code, signal=number.name, reason=f"ended by {number.name}"
        )
    end = RunEnd(status=Status.FAILED, exit_code=code, signal=number.name if number else None)
    end.error = last_error(log)
    if number is not None:
        end.reason = f"killed by {number.name}"
    _look_for_oom(end, ended, number, oom)
    return end


def exit_code_for(end: RunEnd) -> int:
    """What the supervisor itself exits with: the child's code, but never 0 for a run that was stopped."""
    if end.status == Status.INTERRUPTED and not end.exit_code and end.signal:
        return 128 + signal.Signals[end.signal]
    return end.exit_code if end.exit_code is not None else 1


def _signal_of(returncode: int) -> signal.Signals | None:
    """The signal a process died of; 128+n is how shells and `sys.exit` pass one on."""
    number = -returncode if returncode < 0 else returncode - 128
    try:
        return signal.Signals(number)
    except ValueError:
        return None


def _look_for_oom(end: RunEnd, ended: Ended, number: signal.Signals | None, oom: OomWatch) -> None:
    killed = number is signal.SIGKILL
    if killed and (oom.kills() or oom.kernel_named(ended.pid)):
        end.oom = True
        end.reason = "out of memory: killed by the kernel"
    elif killed and oom.kills_on_machine():
        end.oom = True
        end.reason = "killed by SIGKILL while the kernel was out of memory: very likely by it"
    elif killed:
        end.reason = "killed by SIGKILL (likely out of memory or kill -9)"
    elif oom.kills():
        end.oom = True
        end.reason = "out of memory: the kernel killed one of its processes"


def last_error(log: Path) -> dict[str, Any] | None:
    lines = [line for line in _tail_lines(log) if line.strip() and not line.startswith("[rollbook] ")]
    if not lines:
        return None
    last_line = lines[-1].strip()
    starts = [index for index, line in enumerate(lines) if line.rstrip().endswith(_TRACEBACK)]
    found = [error for index in starts if (error := _traceback_end(lines, index))]
    informative = [error for error in found if not str(error["type"]).endswith(_WRAPPERS)]
    if informative or found:
        return {**(informative or found)[-1], "last_line": last_line}
    named = [line.strip() for line in lines if _NAMED_ERROR.match(line.strip())]
    return {"message": named[-1] if named else last_line, "last_line": last_line}


def _traceback_end(lines: list[str], start: int) -> dict[str, Any] | None:
    prefix = lines[start].rstrip().removesuffix(_TRACEBACK)  # `[rank0]: ` or an exception group's rule
    for line in lines[start + 1 :]:
        body = line.removeprefix(prefix)
        if body[:1].isspace():
            continue
        match = _EXCEPTION.fullmatch(body.rstrip())
        if match is None:
            return None
        rank = re.search(r"rank(\d+)", prefix)
        error: dict[str, Any] = {"type": match[1], "message": match[2] or ""}
        return {**error, "rank": int(rank[1])} if rank else error
    return None


def _tail_lines(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return _ESCAPES.sub("", text).split("\n")
