"""How a run begins: fresh, or rewound to a checkpoint; never on top of another run."""

from __future__ import annotations

import os
import socket
from typing import NamedTuple

from rollbook.errors import UsageError
from rollbook.records.atomic import remove_leftovers
from rollbook.records.checkpoints import (
    CheckpointRecord,
    StoredCheckpoint,
    is_complete,
    newest_complete,
    read_checkpoints,
)
from rollbook.records.layout import Layout, RunFiles
from rollbook.records.plain import utc_now
from rollbook.records.redact import redact_tree
from rollbook.records.run_info import (
    RunInfo,
    command_line,
    new_attempt,
    new_run_id,
    read_run_info,
    versions,
    write_run_info,
)
from rollbook.runs.rewind import rewind
from rollbook.runs.run_logs import log_lengths

START_OVER = "start-over"


class Start(NamedTuple):
    info: RunInfo
    resumed_from: CheckpointRecord | None


def start_run(files: RunFiles, *, kind: str, total_iterations: int | None, resume: bool | str) -> Start:
    """Make the directory ready for writing and note the new attempt in run.json."""
    for directory in (files.root, *files.root.glob("iteration_*")):
        remove_leftovers(directory)
    if files.run.exists():
        if not resume:
            raise UsageError(_refusal(files))
        info = read_run_info(files.run)
        stored = _checkpoint_to_resume(files, resume)
        _refuse_other_layout(files, info)
        rewind(files, info, stored)
    else:
        if isinstance(resume, str) and resume != START_OVER:
            raise UsageError(
                f"{files.root} holds no run, so there is no checkpoint {resume!r} to resume from"
            )
        _refuse_foreign_logs(files)
        info, stored = _new_info(files, kind), None
    if total_iterations is not None:
        info.total_iterations = total_iterations
    record = stored.record if stored else None
    name = record.name if record else None
    info.attempts.append(new_attempt(len(info.attempts) + 1, log_lengths(files, info), name))
    write_run_info(files.run, info)
    return Start(info, record)


def _new_info(files: RunFiles, kind: str) -> RunInfo:
    return RunInfo(
        id=new_run_id(),
        kind=kind,
        started_at=utc_now(),
        host=socket.gethostname(),
        pid=os.getpid(),
        layout=files.layout,
        versions=versions(),
        attempts=[],
        command=redact_tree(command_line()),
    )


def _checkpoint_to_resume(files: RunFiles, resume: bool | str) -> StoredCheckpoint | None:
    stored = list(read_checkpoints(files.checkpoints))
    if resume == START_OVER:
        return None
    if resume is True:
        newest = newest_complete(stored, files.root)
        if newest is None and stored:
            gone = ", ".join(str(candidate.record.state_path) for candidate in stored[-3:])
            raise UsageError(
                f"{files.root}: none of its {len(stored)} checkpoints is complete ({gone}); "
                f"restore one, or pass resume={START_OVER!r} to begin again, which keeps the old logs aside"
            )
        return newest
    named = [candidate for candidate in stored if candidate.record.name == resume]
    if not named:
        names = ", ".join(candidate.record.name for candidate in stored) or "none"
        raise UsageError(f"{files.checkpoints}: no checkpoint {resume!r}; there are: {names}")
    if not is_complete(named[-1].record, files.root):
        raise UsageError(
            f"{files.checkpoints}: checkpoint {resume!r} is not complete "
            f"({named[-1].record.state_path} is missing or unfinished); resume=True takes the newest that is"
        )
    return named[-1]


def _refusal(files: RunFiles) -> str:
    newest = newest_complete(read_checkpoints(files.checkpoints), files.root)
    where = f"checkpoint {newest.record.name!r}" if newest else "the beginning: it has no complete checkpoint"
    return (
        f"{files.root} already holds a run; pass resume=True to resume from {where}, "
        f"or choose another log_path"
    )


def _refuse_other_layout(files: RunFiles, info: RunInfo) -> None:
    if info.layout != files.layout:
        raise UsageError(
            f"{files.root} was written with layout={info.layout!r}, not {str(files.layout)!r}; "
            f"pass layout={info.layout!r} to resume it"
        )


def _refuse_foreign_logs(files: RunFiles) -> None:
    foreign = [path.name for path in (files.metrics, files.checkpoints, files.config) if path.exists()]
    if foreign:
        raise UsageError(
            f"{files.root} holds {', '.join(foreign)} but no run.json: another program's run. "
            "Choose another log_path"
        )


def parse_layout(layout: Layout | str) -> Layout:
    try:
        return Layout(layout)
    except ValueError:
        raise UsageError(f"layout {str(layout)!r} is neither 'flat' nor 'nested'") from None
