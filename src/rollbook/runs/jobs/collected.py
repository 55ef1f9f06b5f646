"""The result of a collection, for the history: from its own `<stem>_progress.json`.

A collector that drained exits with 3, as one does whose rollouts failed; only its progress file says which it
was. Drained by a signal or by its time limit, it was `interrupted`; stopped by too many failures, or done
with rollouts missing, it `failed`; nothing missing is `completed`, also after a request to stop.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rollbook.records.atomic import write_atomic
from rollbook.records.progress import Progress

if TYPE_CHECKING:  # a collector imports this module on its way to the first request
    from rollbook.runs.jobs.job import Job
    from rollbook.runs.jobs.ledger import Ledger, RunEnd, RunRecord

# In a run's record, the name of the file in output_dir; in its archive, a note that holds the path.
PROGRESS_KEY = "progress_file"
INCOMPLETE = 3
_OUTPUT_DIR_NOTE = "output_dir"


def set_collection_outcome(end: RunEnd, progress: Progress | None) -> None:
    """Set status, reason and metrics, which an exit code alone does not give."""
    from rollbook.runs.jobs.ledger import Status

    if progress is None:
        return
    reward = {"reward_mean": progress.reward_mean, "reward_std_error": progress.reward_std_error}
    known = {name: value for name, value in reward.items() if value is not None}
    end.metrics = {**known, **progress.coverage}
    missing = f"{progress.missing} of {progress.expected} rollouts are missing"
    if progress.status == "completed" and end.exit_code == 0:
        end.status, end.reason, end.signal, end.error = Status.COMPLETED, None, None, None
    elif progress.status in ("interrupted", "failed") and end.exit_code == INCOMPLETE:
        end.status, end.reason, end.error = Status(progress.status), progress.reason or missing, None
        if progress.status == "interrupted":
            first, _, _ = end.reason.partition(" ")
            end.signal = first if first.startswith("SIG") else None


def write_output_note(archive: Path, progress: Path) -> None:
    """Note for the supervisor where a collection writes; the note of a training run is not overwritten."""
    note = archive / _OUTPUT_DIR_NOTE
    if not note.exists() or (archive / PROGRESS_KEY).exists():
        write_atomic(archive / PROGRESS_KEY, f"{progress.absolute()}\n".encode(), durable=False)
        write_atomic(note, f"{progress.absolute().parent}\n".encode(), durable=False)


def progress_file_of(record: RunRecord, ledger: Ledger) -> Path | None:
    """The progress file of a run that is a collection."""
    name = record.extra.get(PROGRESS_KEY)
    if isinstance(name, str) and record.output_dir:
        return ledger.resolve(record.output_dir) / name
    return _noted(ledger.resolve(record.archive)) if record.archive else None


def progress_file_of_job(job: Job, archive: Path) -> Path | None:
    name = job.extra.get(PROGRESS_KEY)
    return job.output_dir / name if name and job.output_dir else _noted(archive)


def _noted(archive: Path) -> Path | None:
    try:
        return Path((archive / PROGRESS_KEY).read_text().strip())
    except OSError:
        return None
