"""Checkpoints against the logs: each names how long every log was, and holds what a resume needs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from rollbook.audit.auditor import Auditor
from rollbook.audit.result import Kind
from rollbook.audit.scan import size_of
from rollbook.errors import BadLineError
from rollbook.records.checkpoints import CheckpointRecord, StoredCheckpoint, has_mark, read_checkpoints
from rollbook.records.complete import problem
from rollbook.records.layout import RunFiles, is_iteration_file
from rollbook.records.run_info import RunInfo

_OTHER = "restore it from a copy; --resume takes the newest one that is complete"


class Complete(NamedTuple):
    """Which training iterations are complete."""

    ends: Mapping[int, int]  # of each, that of its line in iterations.jsonl
    end: int  # of what was read of that file, to which lines may have been added since


def audit_checkpoints(
    auditor: Auditor, files: RunFiles, complete: Complete | None, *, rotates: bool, verify: bool
) -> None:
    """`complete` is None where there are no iterations.

    `rotates`: old checkpoints are deleted by the run itself. `verify`: read them, and compare their digests.
    """
    try:
        stored = list(read_checkpoints(files.checkpoints))
    except BadLineError as error:
        auditor.find(Kind.UNREADABLE, error.why, file=files.checkpoints, line=error.line)
        return
    auditor.read(size_of(files.checkpoints))
    names: set[str] = set()
    for number, one in enumerate(stored, 1):
        if one.record.name in names:
            what = f"checkpoint {one.record.name!r} is recorded twice"
            auditor.find(Kind.DOUBLED, what, file=files.checkpoints, line=number, key=one.record.name)
        names.add(one.record.name)
        is_newest = number == len(stored)
        _audit_directory(auditor, files, one, number, may_be_gone=rotates and not is_newest, verify=verify)
        if complete is not None:
            _audit_place(auditor, files, one.record, number, complete)
    _audit_lengths(auditor, files, [one.record for one in stored])


def _audit_directory(
    auditor: Auditor,
    files: RunFiles,
    stored: StoredCheckpoint,
    number: int,
    *,
    may_be_gone: bool,
    verify: bool,
) -> None:
    for path in filter(None, (stored.record.state_path, stored.record.sampler_path)):
        if "://" in path:
            continue  # it is somewhere else
        directory = files.root / path
        is_there = directory.exists()
        if (may_be_gone and not is_there) or (is_there and not has_mark(directory, files.root)):
            continue  # rotated away, or a file or directory of the loop's own making
        kind, why = Kind.MISSING, problem(directory)
        if why is None and verify:
            kind, why = Kind.DIFFERS, problem(directory, verify=True)
        auditor.check("checkpoints that are complete", why is None)
        if why is not None:
            what = f"checkpoint {stored.record.name!r}: {why.replace(f'{files.root}/', '')}"
            auditor.find(kind, what, file=files.checkpoints, line=number, key=stored.record.name, next=_OTHER)


def _audit_lengths(auditor: Auditor, files: RunFiles, records: Sequence[CheckpointRecord]) -> None:
    """No log is shorter than when a checkpoint was saved, and each ended with a whole line then."""
    lengths: dict[str, dict[int, str]] = {}
    for record in records:
        for name, length in (record.log_lengths or {}).items():
            if length and _is_inside(name) and not is_iteration_file(name):
                lengths.setdefault(name, {}).setdefault(length, record.name)
    for name, saved in lengths.items():
        path, longest = files.root / name, max(saved)
        if not path.is_file():
            what = f"it is not there; checkpoint {saved[longest]!r} was saved when it had {longest:,} bytes"
            auditor.find(Kind.MISSING, what, file=path)
        elif (size := size_of(path)) < longest:
            what = f"it has {size:,} bytes, and had {longest:,} when checkpoint {saved[longest]!r} was saved"
            auditor.find(Kind.MISSING, what, file=path)
        elif moved := [length for length in sorted(saved) if not ends_a_line(path, length)]:
            what = (
                f"byte {moved[0]} is not the end of a line, as when checkpoint {saved[moved[0]]!r} was saved"
            )
            auditor.find(Kind.DIFFERS, what, file=path)


def _audit_place(
    auditor: Auditor,
    files: RunFiles,
    record: CheckpointRecord,
    number: int,
    complete: Complete,
) -> None:
    """A checkpoint comes right after the iteration that it was saved after."""
    end = (record.log_lengths or {}).get(files.iterations.name)
    if end is None or end > complete.end or record.batch is None:
        return
    done = [iteration for iteration, at in complete.ends.items() if at <= end]
    if not done:
        return
    agrees = max(done) == record.batch - 1
    auditor.check("checkpoints that stand behind their iteration", agrees)
    if not agrees:
        auditor.find(
            Kind.DIFFERS,
            f"checkpoint {record.name!r} continues with iteration {record.batch}, and was saved when "
            f"{max(done)} was the last iteration in iterations.jsonl",
            file=files.checkpoints,
            line=number,
            key=record.name,
        )


def audit_logs(auditor: Auditor, files: RunFiles, info: RunInfo, *, is_open: bool) -> None:
    """Every line of alerts.jsonl, and of the logs that the loop made itself, of all processes."""
    from rollbook.audit.scan import Scan

    names = [files.alerts.name, *filter(_is_inside, info.logs or [])]
    for path in dict.fromkeys(path for name in names for path in files.log_family(name)):
        for _ in Scan(auditor, path, dict, is_open=is_open):
            pass
    for attempt in info.attempts:
        for name, length in attempt.log_lengths.items():
            if size_of(files.root / name) < length and _still_counts(info, attempt.attempt, name):
                what = f"it has fewer than the {length:,} bytes that attempt {attempt.attempt} began with"
                auditor.find(Kind.MISSING, what, file=files.root / name)


def _still_counts(info: RunInfo, attempt: int, name: str) -> bool:
    """Whether no later attempt has cut this log further back."""
    begun = next(one.log_lengths.get(name, 0) for one in info.attempts if one.attempt == attempt)
    return all(later.log_lengths.get(name, 0) >= begun for later in info.attempts if later.attempt > attempt)


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def ends_a_line(path: Path, length: int) -> bool:
    """Whether a line ends with this byte."""
    with path.open("rb") as file:
        return os.pread(file.fileno(), 1, length - 1) == b"\n"
