"""The state of a collection, for `rollbook status`: from its progress file, as long as its process lives."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollbook.errors import UsageError
from rollbook.records.plain import unix_time

if TYPE_CHECKING:
    from rollbook.records.progress import Progress
    from rollbook.runs.jobs.ledger import Ledger, RunRecord
    from rollbook.runs.status import RunStatus


def progress_of_output(ref: str) -> Path | None:
    """The progress file of an output that is named instead of a run."""
    from rollbook.collect.files import CollectionFiles

    path = Path(ref)
    beside = CollectionFiles(path).progress if path.name else path
    if path.name.endswith("_progress.json"):
        progress = path
    elif path.suffix == ".jsonl" or (path.is_file() and beside.is_file()):
        progress = beside
    else:
        return None
    if not progress.is_file():
        raise UsageError(f"{progress}: no such file; a collection into {ref} writes it once it has begun")
    return progress


def report_of_output(path: Path) -> dict[str, Any]:
    """The status of a collection by its files alone, whether or not a history knows it."""
    from rollbook.runs.status import clear_live_fields, read_status, reason_collector_ended

    state = read_status(path.parent, path)
    progress = state.collection
    if progress is None:
        raise UsageError(f"{path}: not a progress file")
    gone = reason_collector_ended(progress, path) if progress.status == "running" else None
    if progress.status != "running" or gone:
        clear_live_fields(state)
    assert state.collection is not None
    status = state.collection.status
    resume = None if status in ("running", "completed") else "rerun the command that collected it to resume"
    return {
        "name": str(path.with_name(progress.output)),
        "status": status,
        "started_at": progress.started_at,
        "elapsed_s": progress.elapsed_s,
        "pid": progress.pid,
        "host": progress.host,
        "progress": state,
        "reason": gone or progress.reason,
        "next": resume,
    }


def status_of_run(record: RunRecord, ledger: Ledger, path: Path) -> RunStatus:
    """The state of a run that is a collection: from its progress file, or, once another session has written
    that, from the history."""
    from rollbook.records.progress import Progress
    from rollbook.runs.status import RunStatus, clear_live_fields, read_status

    state = read_status(path.parent, path)
    if state.collection is None or not _was_written_by(record, state.collection):
        kept = record.metrics or {}
        done, expected, failed, missing = (
            int(kept.get(name) or 0) for name in ("ok", "expected", "failed", "missing")
        )
        progress = Progress(
            status=record.status,
            done=done,
            expected=expected,
            failed=failed,
            missing=missing,
            reward_mean=kept.get("reward_mean"),
            reward_std_error=kept.get("reward_std_error"),
        )
        state = RunStatus(collection=progress if kept else None)
    if not record.is_running:
        clear_live_fields(state)
    return state


def _was_written_by(record: RunRecord, progress: Progress) -> bool:
    """Whether this run wrote the file, and not an earlier or a later one with the same output."""
    began, started, ended = map(unix_time, (progress.started_at, record.started_at, record.completed_at))
    if began is None or (started is not None and began < started):
        return False
    if record.log is None:  # no supervisor: the run is the collector
        return progress.pid == record.pid
    return record.status == "lost" or ended is None or began <= ended


def resume_command(record: RunRecord) -> str | None:
    """What to type to resume a collection."""
    command = record.command or []
    if record.kind != "collect" or "collect" not in command:
        return None
    return shlex.join(["rollbook", *command[command.index("collect") :]])
