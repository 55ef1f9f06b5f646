"""The last word on a finished output: every planned rollout stands in it once, if wanted in input order.

Results are written as they complete. Where each line stands is known by then (a few bytes a line); ordering
copies the lines one after another into a new file that takes the place of the old one whole: a kill in the
middle leaves the old one, and the output is never held in memory.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from rollbook.collect.done import find_done
from rollbook.collect.journal import Done
from rollbook.collect.paths import CollectionFiles
from rollbook.collect.plan import Plan
from rollbook.errors import BadFileError, WriteError
from rollbook.records.atomic import replacing


def finish(files: CollectionFiles, plan: Plan, *, ordered: bool) -> None:
    """Whoever calls holds the lock of the output."""
    found = verify(files, plan)
    if ordered:
        put_in_order(files, found)


def verify(files: CollectionFiles, plan: Plan) -> Done:
    """Read the keys of the finished file and compare them with the plan."""
    done = find_done(files.output, files.journal.with_name(".none"), plan, same_input=False)
    if done.count < plan.expected:
        raise BadFileError(
            files.output,
            f"{plan.expected - done.count} of {plan.expected} rollouts are missing from the finished file; "
            f"remove {files.journal.name} and type the same command to collect them",
        )
    return done


def put_in_order(files: CollectionFiles, done: Done) -> None:
    """Sort the lines by (row, repeat); lines of no planned rollout keep their order, at the end.

    `done` is what stands in the file.
    """
    if done.flags is None or done.entries is None:
        return
    files.journal.unlink(missing_ok=True)  # its offsets are about to mean nothing
    rows, repeats = done.flags.shape
    entries, ends = done.entries, done.entries["end"].astype(np.int64)
    starts = np.concatenate([[0], ends[:-1]])
    is_planned = (entries["row"] < rows) & (entries["repeat"] < repeats)
    place = entries["row"].astype(np.int64) * repeats + entries["repeat"]
    order = np.argsort(np.where(is_planned, place, np.iinfo(np.int64).max), kind="stable")
    if not np.array_equal(order, np.arange(len(ends))):
        _rewrite(files.output, starts[order], ends[order])


def _rewrite(path: Path, starts: np.ndarray[Any, Any], ends: np.ndarray[Any, Any]) -> None:
    try:
        with path.open("rb") as source, replacing(path, is_locked=True) as target:
            for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
                target.write(os.pread(source.fileno(), end - start, start))
    except (OSError, WriteError) as error:
        raise WriteError(f"the lines could not be put in order: {error}") from error
