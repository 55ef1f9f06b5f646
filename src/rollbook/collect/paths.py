"""The files of a collection: all of them stand beside the output and begin with its stem."""

from __future__ import annotations

from pathlib import Path


class CollectionFiles:
    def __init__(self, output: Path) -> None:
        self.shown = output  # as it was typed, for people
        self.output = output.absolute()  # an environment may go to another directory

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

    @property
    def shown_tasks(self) -> Path:
        return self.shown.with_name(self.tasks.name)
