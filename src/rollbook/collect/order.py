"""The finished output in input order, without ever holding it in memory.

Results are written as they complete. Ordering reads where each line stands (a few bytes a line), then copies
the lines one after another into a new file that takes the place of the old one whole: a kill in the middle
leaves the old one.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from rollbook.collect.journal import find_done
from rollbook.collect.paths import CollectionFiles
from rollbook.collect.plan import Plan
from rollbook.errors import WriteError
from rollbook.records.atomic import fsync_directory
from rollbook.records.jsonl import read_blocks
from rollbook.records.locks import FileLock

_BUFFER = 1 << 20


def put_in_order(files: CollectionFiles, plan: Plan) -> None:
    """Sort the lines by (row, repeat); lines of no planned rollout keep their order, at the end."""
    lock = FileLock(files.output)
    try:
        files.journal.unlink(missing_ok=True)  # its offsets are about to mean nothing
        done = find_done(files.output, files.journal, plan, same_input=False)
        ends = _line_ends(files.output)
        starts = np.concatenate([[0], ends[:-1]])
        rank = np.full(len(ends), np.iinfo(np.int64).max)
        planned = done.entries[(done.entries["row"] < plan.rows) & (done.entries["repeat"] < plan.repeats)]
        place = np.searchsorted(ends, planned["end"].astype(np.int64))
        rank[place] = planned["row"].astype(np.int64) * plan.repeats + planned["repeat"]
        order = np.argsort(rank, kind="stable")
        if not np.array_equal(order, np.arange(len(ends))):
            _rewrite(files.output, starts[order], ends[order])
    finally:
        lock.release()


def _line_ends(path: Path) -> np.ndarray[Any, np.dtype[np.int64]]:
    found = [np.empty(0, dtype=np.int64)]
    for offset, block in read_blocks(path, size=8 << 20):
        newlines = np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == ord("\n"))
        found.append(newlines.astype(np.int64) + (offset + 1))
    return np.concatenate(found)


def _rewrite(path: Path, starts: np.ndarray[Any, Any], ends: np.ndarray[Any, Any]) -> None:
    path = path.resolve()  # of a link, the file that it names: the link stays one
    aside = path.with_name(f".{path.name}.ordered")
    try:
        with path.open("rb") as source, aside.open("wb", buffering=_BUFFER) as target:
            for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
                target.write(os.pread(source.fileno(), end - start, start))
            target.flush()
            os.fsync(target.fileno())
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise WriteError(
            f"{path}: could not be put in order ({error.strerror or error}); it is whole as it was"
        ) from error
    fsync_directory(path.parent)
