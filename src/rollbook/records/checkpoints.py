"""checkpoints.jsonl: what was saved, where, and how long every log was at that moment.

`log_lengths` makes resume a rewind: cutting each log to its length gives the run as it was. The newest
record is not always usable (a rotated directory, a save that never finished, a disk that lost bytes), so
readers fall back to the newest one whose files have their size, and a resume (`choose`) to the newest one
whose files also have their digests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rollbook.errors import UsageError
from rollbook.records import complete
from rollbook.records.jsonl import read_lines
from rollbook.records.record import Record, decode_record


class CheckpointRecord(Record, kw_only=True):
    name: str
    batch: int | None = None  # the iteration to go on with
    epoch: int | None = None
    final: bool | None = None
    state_path: str | None = None  # relative paths are relative to the run directory
    sampler_path: str | None = None
    saved_at: str | None = None
    log_lengths: dict[str, int] | None = None

    @property
    def is_final(self) -> bool:
        return bool(self.final) or self.name == "final"


class StoredCheckpoint(NamedTuple):
    """A record and where its line ends in checkpoints.jsonl."""

    record: CheckpointRecord
    end: int


def read_checkpoints(path: Path) -> Iterator[StoredCheckpoint]:
    if path.exists():
        for line in read_lines(path):
            yield StoredCheckpoint(decode_record(path, line, CheckpointRecord), line.end)


class Choice(NamedTuple):
    """The checkpoint that a resume begins with."""

    stored: StoredCheckpoint | None
    passed_over: list[str]  # what is wrong with each newer one

    def path(self, root: Path) -> Path | None:
        """Where its state is."""
        return None if self.stored is None else root / str(self.stored.record.state_path)


NOTHING_SAVED = Choice(None, [])


def newest_complete(stored: Iterable[StoredCheckpoint], root: Path) -> StoredCheckpoint | None:
    for candidate in reversed(list(stored)):
        if is_complete(candidate.record, root):
            return candidate
    return None


def choose(stored: Iterable[StoredCheckpoint], root: Path, *, verify: bool = True) -> Choice:
    """The newest checkpoint whose files are what was saved; to `verify` reads every byte of it."""
    passed_over: list[str] = []
    for candidate in reversed(list(stored)):
        why = flaw(candidate.record, root, verify=verify)
        if why is None:
            return Choice(candidate, passed_over)
        passed_over.append(f"checkpoint {candidate.record.name!r} is passed over: {why}")
    return Choice(None, passed_over)


def none_is_whole(root: Path, passed_over: Sequence[str], instead: str) -> UsageError:
    """Said where checkpoints were recorded and not one of them can be resumed."""
    newest = passed_over[0].partition(": ")[2]
    return UsageError(
        f"{root}: none of its {len(passed_over)} checkpoints is complete (of the newest, {newest}). Restore "
        f"one from a copy, or {instead}"
    )


def is_complete(record: CheckpointRecord, root: Path) -> bool:
    """Whether every file the record names is there, in its full size."""
    return flaw(record, root) is None


def flaw(record: CheckpointRecord, root: Path, *, verify: bool = False) -> str | None:
    """What keeps a checkpoint from being used, in words; None where nothing does.

    `verify` reads every file and compares its digest. What lies behind a URI is taken on trust, and so is
    what a loop has saved in a way of its own.
    """
    for path in (record.state_path, record.sampler_path):
        if not path or "://" in path:
            continue
        if not (root / path).exists():
            return f"{root / path} is not there"
        if has_mark(root / path, root) and (why := complete.problem(root / path, verify=verify)):
            return why
    return None


def has_mark(path: Path, root: Path) -> bool:
    """Whether the mark of a directory says if it is complete: it has one, or is where they all have one."""
    return path.is_dir() and (path.parent == root / "checkpoints" or complete.read_mark(path) is not None)
