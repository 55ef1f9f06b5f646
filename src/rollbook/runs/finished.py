"""Notes in iterations.jsonl which iterations are complete, once their files are."""

from __future__ import annotations

import threading
from typing import Literal

import msgspec

from rollbook.errors import UsageError
from rollbook.records.complete import FileFacts, file_facts
from rollbook.records.iterations import IterationRecord
from rollbook.records.jsonl import JsonlWriter
from rollbook.records.layout import Artifact, RunFiles, base_name

Again = Literal["append", "replace"]
_Key = tuple[str, int]  # split, iteration


class FinishedIterations:
    """A loop that says more about an iteration calls `finish`; for the others `finish_rest` does."""

    def __init__(self, files: RunFiles, writer: JsonlWriter) -> None:
        self._files, self._writer = files, writer
        self._open: set[_Key] = set()
        self._closed: dict[_Key, str | None] = {}  # not named yet: how their blocks ended
        self._recorded: set[_Key] = set()  # by this process, in a block that ended well
        self._guard = threading.RLock()

    def begin(self, split: str, iteration: int, again: Again | None) -> None:
        """Its files are being written from now on; `again` is what becomes of those of an earlier block."""
        if again not in (None, "append", "replace"):
            raise UsageError(f"again={again!r}; it is 'append' or 'replace'")
        with self._guard:
            if (split, iteration) in self._open:
                raise UsageError(f"iteration {iteration} of {split!r} is being recorded already")
            if (split, iteration) in self._recorded and again is None:
                raise UsageError(
                    f"iteration {iteration} of {split!r} is recorded already, and this run recorded it; "
                    "again='append' adds to it, again='replace' sets it aside"
                )
            self._open.add((split, iteration))
            self._closed.pop((split, iteration), None)

    def end(self, split: str, iteration: int, error: str | None) -> None:
        """Its files are closed."""
        with self._guard:
            self._open.discard((split, iteration))
            self._closed[split, iteration] = error
            if error is None:
                self._recorded.add((split, iteration))
            else:  # a loop may well try it again
                self._recorded.discard((split, iteration))

    def finish(self, record: IterationRecord) -> None:
        """Append the line of an iteration; it is on the disk when this returns."""
        base_name(record.split)
        key = (record.split, record.iteration)
        with self._guard:
            if key in self._open:
                raise UsageError(
                    f"iteration {record.iteration} of {record.split!r} is still being recorded; "
                    "call finish_iteration after its `rollouts` block"
                )
            error = record.error or self._closed.get(key)
            line = msgspec.structs.replace(record, files=self._facts(*key), error=error)
            self._writer.append(line.encode())
            self._closed.pop(key, None)

    def finish_rest(self) -> None:
        """Append a line for each iteration that was closed and that the loop says nothing about."""
        with self._guard:
            for split, iteration in list(self._closed):
                self.finish(IterationRecord(split=split, iteration=iteration))

    def _facts(self, split: str, iteration: int) -> dict[str, FileFacts]:
        paths = [self._files.iteration(split, iteration, part) for part in Artifact]
        return {
            path.relative_to(self._files.root).as_posix(): file_facts(path, sync=True)
            for path in sorted(paths)
            if path.exists()
        }
