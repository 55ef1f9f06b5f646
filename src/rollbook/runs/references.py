"""What a reference means: a name, an id, `name@step`, `latest`, or the path of anything.

Commands that take "a run" take any of these. A path that is there wins over a name only if it looks like a
path (it has a `/` or an ending), so that a directory that happens to have the name of a run hides none.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from rollbook.errors import UsageError
from rollbook.records.layout import INDEX_YAML
from rollbook.records.progress import output_of_progress
from rollbook.runs.jobs.collected import progress_file_of
from rollbook.runs.jobs.finish import find_checkpoint, output_dir_of
from rollbook.runs.jobs.ledger import Ledger, RunRecord
from rollbook.runs.lineage import run_of_checkpoint

ARTIFACTS = Path("artifacts")
_FOREIGN_CHECKPOINT = re.compile(r"checkpoint-\d+")


class Found(NamedTuple):
    """A thing, and the run of the history that it was found by."""

    path: Path  # a run's directory, a checkpoint, the output of a collection, any file
    record: RunRecord | None = None

    @property
    def name(self) -> str:
        return self.record.id if self.record is not None else str(self.path)

    @property
    def run_directory(self) -> Path:
        """The directory of the run; that of a checkpoint is the one that it stands in."""
        if not self.path.is_dir():
            raise UsageError(
                f"{self.path} is a file of rows, and no run; rollbook query and rollbook data read it"
            )
        if _FOREIGN_CHECKPOINT.fullmatch(self.path.name) and not (self.path / "run.json").exists():
            return run_of_checkpoint(self.path) or self.path.parent
        return run_of_checkpoint(self.path) or self.path


def find(ref: str | Path, artifacts: Path) -> Found:
    """Raises a UsageError that says what was looked for."""
    if artifacts != ARTIFACTS and not artifacts.is_dir():
        raise UsageError(f"--artifacts {artifacts}: no such directory")
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
        return Found(output_of_progress(progress), record)
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
