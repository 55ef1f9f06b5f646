"""Leave a run running without tmux, and end it politely later.

The supervisor of a detached run is a fresh process in a session of its own, with no terminal and no parent
left: closing the terminal, logging out, or killing everything in the session that started it does not reach
it. The caller hears back once the command has really been started, or why not.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from rollbook.errors import RollbookError, UsageError
from rollbook.runs.children import forget_own_path, python_command, python_environment
from rollbook.runs.jobs.job import Job, Started, decode_job, decode_started, encode_job, encode_started
from rollbook.runs.jobs.ledger import Ledger, RunRecord
from rollbook.runs.jobs.outcome import exit_code_for
from rollbook.runs.jobs.processes import RUN_ID_VARIABLE, is_visible, why_gone
from rollbook.runs.jobs.supervise import supervise

_LOOK_S = 0.1
_LAST_RESORT_S = 5.0


class _Answer(msgspec.Struct):
    """The first and only line a detached supervisor says."""

    started: msgspec.Raw = msgspec.Raw(b"null")
    error: str | None = None


def supervise_detached(job: Job) -> Started:
    """Start the job under a supervisor of its own and return once its command runs.

    RollbookError if it does not, also when the command cannot be found; such a run is in the history too.
    """
    job = msgspec.structs.replace(
        job, artifacts=job.artifacts.absolute(), cwd=(job.cwd or Path.cwd()).absolute()
    )
    environment = {key: value for key, value in os.environ.items() if key != RUN_ID_VARIABLE}
    if RUN_ID_VARIABLE in os.environ:  # started by a run, but none of its processes
        environment["ROLLBOOK_PARENT_RUN"] = os.environ[RUN_ID_VARIABLE]
    launcher = subprocess.run(
        python_command("rollbook.runs.jobs.detach"),
        input=encode_job(job),
        capture_output=True,
        env=python_environment(environment),
        start_new_session=True,
        check=False,
    )
    try:
        answer = msgspec.json.decode(launcher.stdout.partition(b"\n")[0], type=_Answer)
    except msgspec.MsgspecError:
        lines = launcher.stderr.decode("utf-8", "replace").strip().splitlines()
        raise RollbookError(
            f"the detached supervisor did not start: {lines[-1] if lines else 'no message'}"
        ) from None
    if answer.error is not None:
        raise RollbookError(answer.error)
    return decode_started(bytes(answer.started))


def _run_detached() -> None:
    """What `python -m rollbook.runs.jobs.detach` does: read a job, detach from the caller, supervise."""
    job = decode_job(sys.stdin.buffer.read())
    forget_own_path()
    if os.fork() > 0:
        os._exit(0)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    answer = os.dup(1)
    os.set_inheritable(answer, False)
    os.dup2(null, 1)
    replied = False

    def reply_with(reply: _Answer, log: Path | None = None) -> None:
        nonlocal replied
        if not replied:
            replied = True
            with contextlib.suppress(OSError):
                os.write(answer, msgspec.json.encode(reply) + b"\n")
            os.close(answer)
            # From now on the log is the only place where a warning of the supervisor itself can be read.
            os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND) if log else null, 2)

    try:
        end = supervise(
            job,
            terminal=None,
            on_start=lambda started: reply_with(
                _Answer(started=msgspec.Raw(encode_started(started))), started.log
            ),
        )
    except BaseException as error:
        reply_with(_Answer(error=str(error) or repr(error)))
        raise
    reply_with(_Answer(error=f"{end.reason or end.status} (recorded as {end.id})"))
    sys.exit(exit_code_for(end))


def stop(ledger: Ledger, ref: str, timeout_s: float | None = None) -> RunRecord:
    """End a run: SIGTERM to its supervisor, which forwards it; again after `timeout_s`, which kills it.

    By default that is a little more than the run's own grace period. Returns the run's record, which says
    `interrupted`.
    """
    record = ledger.get(ref)
    if not record.is_running:
        raise UsageError(f"{record.id} is not running: it is {record.status}")
    process = record.process
    if process is None or record.host != socket.gethostname() or not is_visible(process):
        raise UsageError(f"{record.id} runs on host {record.host}; type `rollbook stop {record.id}` there")
    grace = record.extra.get("grace_s")
    if timeout_s is None:
        timeout_s = (grace if isinstance(grace, int | float) else 10.0) + _LAST_RESORT_S
    for number, patience_s in (
        (signal.SIGTERM, timeout_s),
        (signal.SIGTERM, _LAST_RESORT_S),  # the same signal again: the supervisor kills at once
        (signal.SIGKILL, _LAST_RESORT_S),  # its guardian ends the rest; the run will be `lost`
    ):
        _send(process.pid, number)
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            if why_gone(process):
                return ledger.get(record.id)
            time.sleep(_LOOK_S)
    raise RollbookError(f"{record.id}: its supervisor (pid {process.pid}) cannot be ended")


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return
    except PermissionError:
        raise UsageError(f"pid {pid} belongs to another user; ask them, or use sudo") from None


if __name__ == "__main__":
    _run_detached()
