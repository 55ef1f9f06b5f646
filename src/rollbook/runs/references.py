"""What a reference means: a name, an id, `name@step`, `latest`, or the path of anything.

Commands that take "a run" take any of these. A path that is there wins over a name only if it looks like a
path (it has a `/` or an ending), so that a directory that happens to have the name of a run hides none.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from rollbook.errors import UsageError
from rollbook.records.layout import INDEX_YAML
from rollbook.runs.jobs.collected import progress_file_of
from rollbook.runs.jobs.finish import find_checkpoint, output_dir_of
from rollbook.runs.jobs.ledger import Ledger, RunRecord


class Found(NamedTuple):
    """A thing, and the run of the history that it was found by."""

    path: Path  # a run's directory, a checkpoint, the output of a collection, any file
    record: RunRecord | None = None


def find(ref: str | Path, artifacts: Path) -> Found:
    """Raises a UsageError that says what was looked for."""
    text = str(ref)
    path = Path(ref).expanduser()
    if path.exists() and (_looks_like_a_path(text) or not (artifacts / INDEX_YAML).exists()):
        return Found(path)
    name, step = split_step(text)
    ledger = Ledger(artifacts)
    try:
        record = ledger.get(name)
    except UsageError:
        if path.exists():
            return Found(path)
        if _looks_like_a_path(text):
            raise UsageError(f"{text}: no such file or directory") from None
        raise
    if (progress := progress_file_of(record, ledger)) is not None:
        return Found(progress.with_name(f"{progress.name.removesuffix('_progress.json')}.jsonl"), record)
    directory = output_dir_of(record, ledger)
    if directory is None:
        raise UsageError(f"{record.id} did not say where it writes; start it with --output-dir next time")
    return Found(directory if step is None else find_checkpoint(directory, step).path, record)


def split_step(ref: str) -> tuple[str, int | None]:
    """`demo@200` as (`demo`, 200)."""
    name, at, step = ref.rpartition("@")
    if not at:
        return ref, None
    if not step.isdigit():
        raise UsageError(f"{step!r} is not a step; write it like {name}@200")
    return name, int(step)


def _looks_like_a_path(text: str) -> bool:
    return "/" in text or bool(Path(text).suffix) or text in (".", "..")
