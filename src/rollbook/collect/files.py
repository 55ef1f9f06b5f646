"""The files of a collection: all of them are beside the output and begin with its stem."""

from __future__ import annotations

from pathlib import Path

from rollbook.records.datasets import failures_path, tasks_path


class CollectionFiles:
    def __init__(self, output: Path, given: Path | None = None) -> None:
        """`given` is the input; without one the environment makes tasks beside the output."""
        self.shown = output  # as it was typed, for people
        self.output = output.absolute()  # an environment may go to another directory
        named = self._beside(".jsonl")  # whatever the output's ending
        self.failures = failures_path(named)
        self.manifest = self._beside("_manifest.json")
        self.progress = self._beside("_progress.json")
        self.tasks = tasks_path(named)
        self.journal = self._beside("_journal.bin")  # of earlier versions
        self.shown_input = given or output.with_name(self.tasks.name)
        self.input = self.shown_input.absolute()

    @property
    def have_results(self) -> bool:
        return self.output.exists() and self.output.stat().st_size > 0

    def _beside(self, ending: str) -> Path:
        return self.output.with_name(f"{self.output.stem}{ending}")
