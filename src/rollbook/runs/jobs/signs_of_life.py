"""Signs that a run lives although its process cannot be seen from here: files that move, a lock that is held.

Another machine may go by this one's name and share its files; there the process is judged by a boot id that
means nothing here. What such a run writes, and the lock it holds, are visible all the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rollbook.records.layout import RunFiles
from rollbook.records.locks import is_held

if TYPE_CHECKING:
    from rollbook.runs.jobs.ledger import Ledger, RunRecord


def files_moved_at(record: RunRecord, ledger: Ledger, *, owns_directory: bool) -> float | None:
    """When one of the run's files was last written; its directory counts where no later run writes there."""
    places = [ledger.resolve(path) for path in (record.log, record.archive) if path]
    if owns_directory:
        places += _outputs(record, ledger)
    times = [path.stat().st_mtime for path in _files(places)]
    return max(times, default=None)


def holds_a_lock(record: RunRecord, ledger: Ledger) -> bool:
    return any(is_held(path) for path in _outputs(record, ledger)) or _holds_directory(record, ledger)


def _holds_directory(record: RunRecord, ledger: Ledger) -> bool:
    return record.output_dir is not None and is_held(RunFiles(ledger.resolve(record.output_dir)).run)


def _outputs(record: RunRecord, ledger: Ledger) -> list[Path]:
    """A collection's own files, which stand beside others; of any other run its whole directory."""
    from rollbook.runs.jobs.collected import progress_file_of

    progress, output = progress_file_of(record, ledger), record.extra.get("output")
    if progress is not None:
        return [progress, progress.with_name(output)] if isinstance(output, str) else [progress]
    return [ledger.resolve(record.output_dir)] if record.output_dir else []


def _files(places: Iterable[Path]) -> list[Path]:
    found = []
    for place in places:
        with contextlib.suppress(OSError):
            inside = [path for path in place.iterdir() if path.is_file()] if place.is_dir() else []
            found += [place, *inside] if place.is_file() else inside
    return found
