"""The files of a collection: all of them stand beside the output and begin with its stem."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class CollectionFiles:
    output: Path

    def _beside(self, ending: str) -> Path:
        return self.output.with_name(f"{self.output.stem}{ending}")

    @property
    def failures(self) -> Path:
        return self._beside("_failures.jsonl")

    @property
    def manifest(self) -> Path:
        return self._beside("_manifest.json")

    @property
    def progress(self) -> Path:
        return self._beside("_progress.json")

    @property
    def journal(self) -> Path:
        return self._beside("_journal.bin")

    @property
    def tasks(self) -> Path:
        """The input of a collection whose environment made its own tasks."""
        return self._beside("_tasks.jsonl")
