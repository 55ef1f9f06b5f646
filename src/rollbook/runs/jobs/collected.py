"""What a collection came to, for the history: by its own `<stem>_progress.json`.

A collector that drained exits with 3, as one does whose rollouts failed; only its progress file says which it
was. Drained by a signal or by its time limit, it was `interrupted`; stopped by too many failures, or done
with rollouts missing, it `failed`; nothing missing is `completed`, also when it had been told to stop.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from rollbook.records.atomic import write_atomic

if TYPE_CHECKING:  # a collector imports this module on its way to the first request
    from rollbook.runs.jobs.job import Job
    from rollbook.runs.jobs.ledger import Ledger, RunEnd, RunRecord

# In a run's record, the name of the file in output_dir; in its archive, a note that holds the path.
PROGRESS_KEY = "progress_file"
INCOMPLETE = 3
_OUTPUT_DIR_NOTE = "output_dir"


def read_plain_progress(path: Path) -> dict[str, Any]:
    """The content of a progress file; empty if there is none."""
    try:
        content = orjson.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def judge_collection(end: RunEnd, progress: Mapping[str, Any]) -> None:
    """Set what an exit code alone does not tell, and the metrics."""
    from rollbook.runs.jobs.ledger import Status

    names = {"reward_mean": "reward_mean", "ok": "done", "failed": "failed"}
    names |= {"missing": "missing", "expected": "expected"}
    end.metrics = {name: progress[key] for name, key in names.items() if progress.get(key) is not None}
    status, reason = progress.get("status"), progress.get("reason")
    if status == "complete" and end.exit_code == 0:
        end.status, end.reason, end.signal, end.error = Status.COMPLETED, None, None, None
    elif status == "stopped" and end.exit_code == INCOMPLETE:
        end.status, end.reason, end.error = Status.INTERRUPTED, str(reason), None
        first = str(reason).partition(" ")[0]
        end.signal = first if first.startswith("SIG") else None
    elif status == "incomplete" and end.exit_code == INCOMPLETE:
        missing = f"{progress.get('missing')} of {progress.get('expected')} rollouts are missing"
        end.status, end.reason, end.error = Status.FAILED, str(reason or missing), None


def tell_supervisor(archive: Path, progress: Path) -> None:
    """Leave word of where a supervised collection writes; a training run's own word is not overwritten."""
    told = archive / _OUTPUT_DIR_NOTE
    if not told.exists() or (archive / PROGRESS_KEY).exists():
        write_atomic(archive / PROGRESS_KEY, f"{progress.absolute()}\n".encode(), durable=False)
        write_atomic(told, f"{progress.absolute().parent}\n".encode(), durable=False)


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
