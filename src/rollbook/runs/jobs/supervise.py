"""Run any command so that the history says truthfully what became of it.

The command runs in a session of its own under this process, which notes its start before and its end after,
forwards INT, TERM and HUP once each, kills it when the grace period is over (or the same signal comes
again), and leaves none of its processes behind. Its output goes to `artifacts/logs/` and to the terminal. If
this process is killed, the guardian ends the run's processes and the next command that reads the history
records the run as lost.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollbook.errors import RollbookError, UsageError
from rollbook.records.identity import new_history_id
from rollbook.records.layout import sanitize
from rollbook.records.redact import redact_tree
from rollbook.records.redact_configs import redact_yaml
from rollbook.runs.jobs.child import GuardianLink, Stream, start_child, stdin_for_child
from rollbook.runs.jobs.job import Job, Started
from rollbook.runs.jobs.ledger import Ledger, RunEnd, RunStart, Status
from rollbook.runs.jobs.outcome import NOT_EXECUTABLE, NOT_FOUND, judge
from rollbook.runs.jobs.processes import RUN_ID_VARIABLE, OomWatch
from rollbook.runs.jobs.signals import SignalQueue
from rollbook.runs.jobs.snapshot import capture_job_code, git_of, take_snapshot
from rollbook.runs.jobs.system import SystemSampler
from rollbook.runs.jobs.watch import Ended, Watch

_log = logging.getLogger("rollbook")


def supervise(
    job: Job,
    *,
    ledger: Ledger | None = None,
    terminal: int | None = 1,
    on_start: Callable[[Started], None] | None = None,
) -> RunEnd:
    """Run the job to its end, whatever that is; `terminal` is where its output is copied to.

    Must be called from the main thread, before it has started others: signals and the tie between parent
    and child belong to it.
    """
    if not job.command:
        raise UsageError("no command to run; give one after `--`")
    _learn_secrets(job)
    with SignalQueue() as signals:
        return _Supervisor(job, ledger or Ledger(job.artifacts), signals, terminal, on_start).run()


def _learn_secrets(job: Job) -> None:
    """What the job's command, environment and config hold is redacted in all that is written of it."""
    redact_tree([list(job.command), job.env, job.config], remember=True)
    if job.config_path is not None and job.config_path.is_file():
        with contextlib.suppress(OSError):
            redact_yaml(job.config_path.read_text("utf-8", "surrogateescape"), remember=True)


class _Supervisor:
    def __init__(
        self,
        job: Job,
        ledger: Ledger,
        signals: SignalQueue,
        terminal: int | None,
        on_start: Callable[[Started], None] | None,
    ) -> None:
        self._job, self._ledger, self._signals = job, ledger, signals
        self._terminal, self._on_start = terminal, on_start
        self._started: Started | None = None
        self._began = time.monotonic()
        self.id = new_history_id(job.name)
        self.archive = ledger.artifacts / "archives" / self.id

    def run(self) -> RunEnd:
        try:
            self.archive.mkdir(parents=True, exist_ok=True)
            self.log = _create_log(self._ledger.artifacts / "logs", self._job.name, self.id)
        except OSError as error:
            raise UsageError(f"{self._ledger.artifacts}: cannot write here: {error.strerror}") from error
        code = capture_job_code(self._job)
        self._ledger.start(self._start_record(git_of(code)))
        try:
            take_snapshot(self.archive, self._job, code)
            end = self._run_child()
        except BaseException as error:
            self._record(RunEnd(status=Status.FAILED, reason=f"the supervisor failed: {error!r}"))
            raise
        self._call_finisher(end)
        self._record(end)
        return end

    def _start_record(self, git: dict[str, Any] | None) -> RunStart:
        job = self._job
        return RunStart(
            id=self.id,
            name=job.name,
            kind=job.kind,
            command=list(job.command),
            git=git,
            output_dir=str(job.output_dir) if job.output_dir else None,
            log=str(self.log),
            archive=str(self.archive),
            config=str(job.config_path) if job.config_path else None,
            resumed_from=job.resumed_from,
            extra={"grace_s": job.grace_s, **job.extra},
        )

    def _run_child(self) -> RunEnd:
        if early := self._signals.take():
            number = early[0].signal
            return RunEnd(
                status=Status.INTERRUPTED,
                exit_code=128 + number,
                signal=number.name,
                reason=f"stopped by {number.name} before it began",
            )
        oom = OomWatch()
        is_tty = self._terminal is not None and os.isatty(self._terminal)
        stream = Stream(self._terminal if is_tty else None)
        try:
            guardian = GuardianLink(self.id, self.log, self._job.grace_s, stream)
            try:
                ended = self._start_and_watch(stream, guardian)
            finally:
                guardian.close()
                guardian.wait(self._job.grace_s + 5)
        except _NotStartedError as error:
            return self._not_started(error.why)
        finally:
            stream.close()
        end = judge(ended, self.log, oom)
        if ended.leftovers:
            end.extra["leftovers"] = ended.leftovers
        return end

    def _start_and_watch(self, stream: Stream, guardian: GuardianLink) -> Ended:
        try:
            child = start_child(
                self._job.command, stream, cwd=self._job.cwd, env=self._environment(), stdin=stdin_for_child()
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            guardian.done()
            raise _NotStartedError(error) from error
        guardian.tell_child(child.pid)
        stream.close_sink()
        sampler = SystemSampler(self.archive, child.pid, every_s=self._job.sample_every_s)
        watch = Watch(
            child,
            self.id,
            stream,
            guardian,
            self._signals,
            terminal=self._terminal,
            grace_s=self._job.grace_s,
            every_turn=sampler.tick,
        )
        self._started = Started(self.id, self.log, self.archive, os.getpid(), child.pid)
        try:
            if self._on_start:
                self._on_start(self._started)
            return watch.until_over()
        except BaseException:
            watch.processes.signal(signal.SIGKILL)
            raise
        finally:
            sampler.close()

    def _environment(self) -> dict[str, str]:
        environment = {"PYTHONUNBUFFERED": "1", **os.environ, **self._job.env}
        environment[RUN_ID_VARIABLE] = self.id
        environment["ROLLBOOK_RUN_NAME"] = self._job.name
        environment["ROLLBOOK_ARTIFACTS"] = str(self._ledger.artifacts)
        environment["ROLLBOOK_RUN_DIR"] = str(self.archive)
        if self._job.output_dir:
            environment["ROLLBOOK_OUTPUT_DIR"] = str(self._job.output_dir)
        return environment

    def _not_started(self, error: BaseException) -> RunEnd:
        program = self._job.command[0]
        code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
        if self._job.cwd and not self._job.cwd.is_dir():
            why = f"{self._job.cwd}: no such directory to run it in"
        elif isinstance(error, FileNotFoundError):
            why = f"{program}: command not found; check its spelling and PATH"
        elif isinstance(error, PermissionError):
            why = f"{program}: not executable; `chmod +x` it, or name its interpreter"
        else:
            why = f"{program}: cannot be run: {error}"
        with self.log.open("a") as log:
            log.write(f"[rollbook] {why}\n")
        kind = type(error).__name__
        return RunEnd(
            status=Status.FAILED,
            exit_code=code,
            reason=why,
            error={"type": kind, "message": why, "last_line": why},
        )

    def _call_finisher(self, end: RunEnd) -> None:
        """Whatever it does, the run is recorded as it ended."""
        if self._job.finisher is None or self._started is None:
            return
        try:
            module, _, function = self._job.finisher.partition(":")
            getattr(importlib.import_module(module), function)(self._job, self._started, end)
        except Exception as error:
            end.extra["finisher_error"] = f"{type(error).__name__}: {error}"
            _log.warning("%s: after the run, %s failed: %s", self.id, self._job.finisher, error)

    def _record(self, end: RunEnd) -> None:
        end.duration_s = round(time.monotonic() - self._began, 3)
        try:
            self._ledger.end(self.id, end)
        except RollbookError as error:
            end.id = self.id
            end.extra["unrecorded"] = str(error)
            _log.error("%s ended as %s, but that could not be recorded: %s", self.id, end.status, error)


class _NotStartedError(Exception):
    def __init__(self, why: BaseException) -> None:
        self.why = why


def _create_log(directory: Path, name: str, run_id: str) -> Path:
    """`<run>_<timestamp>.log`; two of one second get the end of their ids too."""
    directory.mkdir(parents=True, exist_ok=True)
    stamp, suffix = run_id.split("-", 1)[0], run_id.rsplit("-", 1)[1]
    for stem in (f"{sanitize(name)[:80]}_{stamp}", f"{sanitize(name)[:80]}_{stamp}_{suffix}"):
        path = directory / f"{stem}.log"
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            continue
        return path
    raise FileExistsError(directory)
