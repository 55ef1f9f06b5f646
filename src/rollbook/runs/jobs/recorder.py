"""A run that notes itself in the history, without a supervisor and without being held up by it.

The start is written by a thread, and so is the snapshot a little later, when the run's own first steps are
behind it: whoever starts thousands of requests does not wait for a lock or for git. A process that is killed
says no more, and the next command that reads the history records it as lost, as it does for a supervisor.
A history that cannot be written costs one line of warning, never the run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rollbook.errors import RollbookError
from rollbook.records.plain import utc_now
from rollbook.runs.jobs.job import Job

if TYPE_CHECKING:
    from rollbook.runs.jobs.ledger import Ledger, RunEnd

_START_AFTER_S = 0.15  # the imports below would take turns with the first steps of the run
_SNAPSHOT_AFTER_S = 0.5


class Recorder:
    def __init__(self, job: Job, log: Callable[[str], None]) -> None:
        self._job, self._log = job, log
        self._began, self._started_at = time.monotonic(), utc_now()
        self._ledger: Ledger | None = None  # once the start is recorded
        self._id = ""
        self._git: object = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._record_start, name="rollbook-history", daemon=True)
        self._thread.start()

    def end(self, end: RunEnd) -> None:
        self._over.set()
        self._thread.join()
        if self._ledger is None:
            return
        end.duration_s = round(time.monotonic() - self._began, 3)
        if self._git is not None:
            end.extra["git"] = self._git
        try:
            self._ledger.end(self._id, end)
        except (RollbookError, OSError) as error:
            self._log(f"how this run ended is not in the history: {error}")

    def _record_start(self) -> None:
        self._over.wait(_START_AFTER_S)
        from rollbook.runs.jobs.ledger import Ledger, RunStart, new_id

        job = self._job
        ledger, self._id = Ledger(job.artifacts), new_id(job.name)
        archive = ledger.artifacts / "archives" / self._id
        start = RunStart(
            id=self._id,
            name=job.name,
            kind=job.kind,
            started_at=self._started_at,
            command=list(job.command),
            output_dir=str(job.output_dir) if job.output_dir else None,
            archive=str(archive),
            extra={"grace_s": job.grace_s, **job.extra},
        )
        try:
            archive.mkdir(parents=True, exist_ok=True)
            ledger.start(start)
        except (RollbookError, OSError) as error:
            why = f"{job.artifacts}: {error.strerror}" if isinstance(error, OSError) else str(error)
            self._log(f"{why}, so this run is not in the history; it continues without")
            return
        self._ledger = ledger
        self._over.wait(_SNAPSHOT_AFTER_S)
        from rollbook.runs.jobs.snapshot import capture_job_code, git_of, take_snapshot

        code = capture_job_code(job)
        self._git = git_of(code)
        take_snapshot(archive, job, code, of_this_process=True)
