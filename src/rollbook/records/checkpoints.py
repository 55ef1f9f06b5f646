"""checkpoints.jsonl: what was saved, where, and how long every log was at that moment.

`log_lengths` makes resume a rewind: cutting each log to its length gives the run as it was. The newest
record is not always usable (a rotated directory, a save that never finished), so `newest_complete` falls
back to the newest one whose files are all there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

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


class StoredCheckpoint(NamedTuple):
    """A record and where its line ends in checkpoints.jsonl."""

    record: CheckpointRecord
    end: int


def read_checkpoints(path: Path) -> Iterator[StoredCheckpoint]:
    if path.exists():
        for line in read_lines(path):
            yield StoredCheckpoint(decode_record(path, line, CheckpointRecord), line.end)


def newest_complete(stored: Iterable[StoredCheckpoint], root: Path) -> StoredCheckpoint | None:
    for candidate in reversed(list(stored)):
        if is_complete(candidate.record, root):
            return candidate
    return None


def is_complete(record: CheckpointRecord, root: Path) -> bool:
    """Whether every file the record names is there. What lies behind a URI is taken on trust."""
    paths = [path for path in (record.state_path, record.sampler_path) if path]
    return all("://" in path or _is_whole(root / path, root) for path in paths)


def _is_whole(path: Path, root: Path) -> bool:
    if not path.exists():
        return False
    made_here = path.is_dir() and path.parent == root / "checkpoints"
    return complete.is_complete(path) if made_here else True
