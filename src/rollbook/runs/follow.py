"""What is new in a run since the last look, for anything that watches one live.

A poll costs a look at each file's size; only files that changed are read, from where the last read ended.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from rollbook.errors import BadLineError
from rollbook.records.alerts import Alert
from rollbook.records.checkpoints import CheckpointRecord
from rollbook.records.iterations import IterationRecord
from rollbook.records.jsonl import Line
from rollbook.records.layout import Artifact, RunFiles
from rollbook.records.metrics import normalize
from rollbook.records.record import Record, decode_line, decode_record
from rollbook.records.rollouts import RolloutSummary
from rollbook.records.tail import Tail
from rollbook.records.transcripts import Transcript


class Source(StrEnum):
    METRICS = "metrics"
    ALERTS = "alerts"
    CHECKPOINTS = "checkpoints"
    ITERATIONS = "iterations"
    ROLLOUTS = "rollouts"
    TRANSCRIPTS = "transcripts"


class Update(NamedTuple):
    """New records of one file. `restarted`: the file was cut or replaced; drop what came from it before.

    A line that is not a record is an error beside the others, so that one bad line does not end the watch.
    """

    source: Source
    path: Path
    records: list[Any]
    restarted: bool
    errors: list[BadLineError]


_RECORDS: dict[Source, type[Record]] = {
    Source.ALERTS: Alert,
    Source.CHECKPOINTS: CheckpointRecord,
    Source.ITERATIONS: IterationRecord,
    Source.ROLLOUTS: RolloutSummary,
    Source.TRANSCRIPTS: Transcript,
}
_PER_ITERATION = {Artifact.SUMMARIES: Source.ROLLOUTS, Artifact.TRANSCRIPTS: Source.TRANSCRIPTS}


class Follower:
    def __init__(self, files: RunFiles, *, foreign: bool = False) -> None:
        self._files = files
        self._foreign = foreign
        self._tails: dict[Path, tuple[Source, Tail]] = {}
        self._seen: dict[Path, tuple[int, int, int]] = {}

    def poll(self) -> list[Update]:
        """Everything new, a bounded amount a file; call again at once while updates come."""
        updates = []
        present = self._present()
        for path, source in present.items():
            try:
                status = path.stat()
            except FileNotFoundError:  # a resume set it aside since we looked; the next poll says so
                continue
            signature = (status.st_ino, status.st_size, status.st_mtime_ns)
            if self._seen.get(path) == signature:
                continue
            update, more = self._read(path, source)
            if not more:
                self._seen[path] = signature
            if update.records or update.restarted or update.errors:
                updates.append(update)
        for path in [path for path in self._tails if path not in present]:
            source, _ = self._tails.pop(path)
            self._seen.pop(path, None)
            updates.append(Update(source, path, [], restarted=True, errors=[]))
        return updates

    def _present(self) -> dict[Path, Source]:
        logs = {
            self._files.metrics: Source.METRICS,
            self._files.alerts: Source.ALERTS,
            self._files.checkpoints: Source.CHECKPOINTS,
            self._files.iterations: Source.ITERATIONS,
        }
        found = {path: source for path, source in logs.items() if path.exists()}
        for file in self._files.iteration_files():
            if file.artifact in _PER_ITERATION:
                found[file.path] = _PER_ITERATION[file.artifact]
        return found

    def _read(self, path: Path, source: Source) -> tuple[Update, bool]:
        _, tail = self._tails.setdefault(path, (source, Tail(path)))
        batch = tail.poll()
        records: list[Any] = []
        errors: list[BadLineError] = []
        for line in batch.lines:
            try:
                records.append(self._decode(path, line, source))
            except BadLineError as error:
                errors.append(error)
        return Update(source, path, records, batch.restarted, errors), batch.more

    def _decode(self, path: Path, line: Line, source: Source) -> Any:
        if source is not Source.METRICS:
            return decode_record(path, line, _RECORDS[source])
        row = decode_line(path, line)
        return normalize(row) if self._foreign else row
