"""How a run begins: fresh, or rewound to a checkpoint; never on top of another run."""

from __future__ import annotations

import os
import socket
from typing import NamedTuple

from rollbook.errors import UsageError
from rollbook.records.atomic import remove_leftovers
from rollbook.records.checkpoints import (
    NOTHING_SAVED,
    CheckpointRecord,
    Choice,
    StoredCheckpoint,
    choose,
    flaw,
    newest_complete,
    none_is_whole,
    read_checkpoints,
)
from rollbook.records.identity import new_run_id
from rollbook.records.layout import Layout, RunFiles
from rollbook.records.plain import utc_now
from rollbook.records.redact import redact_tree
from rollbook.records.run_info import (
    RunInfo,
    command_line,
    new_attempt,
    read_run_info,
    versions,
    write_run_info,
)
from rollbook.runs.rewind import rewind
from rollbook.runs.run_logs import log_lengths

START_OVER = "start-over"


Resume = bool | str | Choice  # see `Run`


class Start(NamedTuple):
    info: RunInfo
    resumed_from: CheckpointRecord | None
    passed_over: list[str]  # newer checkpoints, and what is wrong with each


def start_run(files: RunFiles, *, kind: str, total_iterations: int | None, resume: Resume) -> Start:
    """Make the directory ready for writing and note the new attempt in run.json."""
    choice = NOTHING_SAVED
    for directory in (files.root, *files.root.glob("iteration_*")):
        remove_leftovers(directory)
    if files.run.exists():
        if not resume:
            raise UsageError(_refusal(files))
        info = read_run_info(files.run)
        choice = _checkpoint_to_resume(files, resume)
        _refuse_other_layout(files, info)
        rewind(files, info, choice.stored)
    else:
        if isinstance(resume, str) and resume != START_OVER:
            raise UsageError(
                f"{files.root} holds no run, so there is no checkpoint {resume!r} to resume from"
            )
        _refuse_foreign_logs(files)
        info = _new_info(files, kind)
    if total_iterations is not None:
        info.total_iterations = total_iterations
    record = choice.stored.record if choice.stored else None
    name = record.name if record else None
    info.attempts.append(new_attempt(len(info.attempts) + 1, log_lengths(files, info), name))
    write_run_info(files.run, info)
    return Start(info, record, choice.passed_over)


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


def _checkpoint_to_resume(files: RunFiles, resume: Resume) -> Choice:
    stored = list(read_checkpoints(files.checkpoints))
    if resume == START_OVER:
        return NOTHING_SAVED
    if isinstance(resume, Choice):
        if (resume.stored is None and stored) or (resume.stored and resume.stored not in stored):
            raise UsageError(f"{files.root} changed while it was being opened; run the command again")
        return resume
    if resume is True:
        choice = choose(stored, files.root)
        if choice.stored is None and stored:
            again = f"pass resume={START_OVER!r} to begin again, which keeps the old logs aside"
            raise none_is_whole(files.root, choice.passed_over, again)
        return choice
    return Choice(named_checkpoint(files, str(resume)), [])


def named_checkpoint(files: RunFiles, name: str, *, verify: bool = True) -> StoredCheckpoint:
    """The checkpoint of a name; refused where it is not whole."""
    stored = list(read_checkpoints(files.checkpoints))
    named = [candidate for candidate in stored if candidate.record.name == name]
    if not named:
        names = ", ".join(candidate.record.name for candidate in stored) or "none"
        raise UsageError(f"{files.checkpoints}: no checkpoint {name!r}; there are: {names}")
    if (why := flaw(named[-1].record, files.root, verify=verify)) is not None:
        raise UsageError(
            f"{files.checkpoints}: checkpoint {name!r} is not complete: {why}; resume=True takes the newest "
            "that is"
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
