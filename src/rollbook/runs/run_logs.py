"""The append-only logs of a run: any file of JSON lines below its directory, under the run's one lock.

Their lengths are in every checkpoint, and a resume cuts each back to its length. So that it knows them, the
name of a log is in run.json before its first line is written. A log named for `rank_0` stands for those
of all ranks, which the other processes write themselves.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path, PurePosixPath

from rollbook.errors import UsageError
from rollbook.records.jsonl import EVERY_LINE, ON_CLOSE, JsonlWriter, SyncPolicy, every_ms
from rollbook.records.layout import RunFiles, is_iteration_file
from rollbook.records.locks import FileLock
from rollbook.records.run_info import RunInfo, write_run_info

_METRICS_SYNC_MS = 1000


class RunLogs:
    def __init__(self, files: RunFiles, info: RunInfo, lock: FileLock) -> None:
        self._files, self._info, self._lock = files, info, lock
        self._opened = ExitStack()
        self._writers: dict[str, JsonlWriter] = {}
        with ExitStack() as undo:
            undo.callback(self._opened.close)
            self.metrics = self._open(files.metrics, every_ms(_METRICS_SYNC_MS))
            self.alerts = self._open(files.alerts, EVERY_LINE)
            self.iterations = self._open(files.iterations, EVERY_LINE)
            self.checkpoints = JsonlWriter(files.checkpoints, sync=EVERY_LINE, lock=lock)
            self._opened.callback(self.checkpoints.close)
            undo.pop_all()

    def append_log(self, name: str) -> JsonlWriter:
        """The writer of one more log, `name` being its path below the run's directory."""
        path = checked_log(self._files, name)
        if name in self._writers:
            return self._writers[name]
        known = self._info.logs or []
        if name not in known:
            self._info.logs = [*known, name]
            write_run_info(self._files.run, self._info)
        return self._open(path, ON_CLOSE, check=False)

    def sync(self) -> None:
        """Put every line on the disk, also those that other ranks have written so far."""
        for writer in self._writers.values():
            writer.sync()
        for path in self._of_other_ranks():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def lengths(self, of_other_ranks: Mapping[str, int] | None = None) -> dict[str, int]:
        return log_lengths(self._files, self._info) | dict(of_other_ranks or {})

    def close(self) -> None:
        self._opened.close()

    def _open(self, path: Path, sync: SyncPolicy, *, check: bool = True) -> JsonlWriter:
        writer = JsonlWriter(path, sync=sync, lock=self._lock, check=check)
        self._opened.callback(writer.close)
        self._writers[path.relative_to(self._files.root).as_posix()] = writer
        return writer

    def _of_other_ranks(self) -> list[Path]:
        own = {writer.path for writer in self._writers.values()}
        return [path for path in log_paths(self._files, self._info) if path not in own]


def log_paths(files: RunFiles, info: RunInfo) -> list[Path]:
    """Every log on disk that a checkpoint has the length of."""
    names = [path.name for path in (files.metrics, files.alerts, files.iterations)]
    return [path for name in [*names, *(info.logs or [])] for path in files.log_family(name)]


def log_lengths(files: RunFiles, info: RunInfo) -> dict[str, int]:
    paths = sorted(log_paths(files, info))
    return {path.relative_to(files.root).as_posix(): path.stat().st_size for path in paths}


def checked_log(files: RunFiles, name: str) -> Path:
    """The path of a log, refused where it is not below the run or is a file of the run's own."""
    relative = PurePosixPath(name)
    if relative.is_absolute() or not relative.name or str(relative) != name or ".." in relative.parts:
        raise UsageError(
            f"log {name!r} is not a plain path below the run directory, such as 'exports/rank_0.jsonl'"
        )
    path = files.root / relative
    own = (files.metrics, files.alerts, files.iterations, files.checkpoints, files.run, files.config)
    reserved = relative.parts[0] in (files.superseded.name, files.checkpoint_root.name)
    if path in own or reserved or is_iteration_file(name):
        raise UsageError(f"log {name!r} is written by the run itself; choose another name")
    return path
