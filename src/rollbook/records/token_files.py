"""The files of a token export: one per process, and a manifest that says what in them counts.

    token_exports/manifest.jsonl        a line per exported iteration, when all processes have written theirs
    token_exports/rank_0.jsonl          the records of one process
    token_exports/rank_0_000010.parquet the same as Parquet: the part that begins with iteration 10
    token_exports/rank_0_000010.arrows  the part that is still open, an Arrow stream

A file is read up to the `end` of the manifest's last line about it. What follows is being written
now, or was when the writer was killed; a resume cuts it off.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rollbook.errors import BadFileError, UsageError
from rollbook.records.jsonl import JsonlWriter, Line, read_lines
from rollbook.records.layout import TRAIN
from rollbook.records.record import Record, decode_record
from rollbook.records.token_settings import TokenExportSettings
from rollbook.records.versions import made_by_newer

SCHEMA_VERSION = 1
TOKEN_EXPORTS = "token_exports"  # the directory, and the key of run.json that names the manifests
MANIFEST = "manifest.jsonl"
PARQUET, STREAM = ".parquet", ".arrows"
_RANK_FILE = re.compile(r"rank_(\d+)(?:_(\d{6,}))?\.(?:jsonl|parquet|arrows)")


class RunIdentity(NamedTuple):
    """Whose records an export holds; the process that writes the run tells the others."""

    run_id: str
    attempt: int
    split: str = TRAIN


class RankPart(msgspec.Struct, kw_only=True):
    """What one process trained of an iteration, and wrote of that."""

    rank: int
    file: str | None = None  # beside the manifest; a `.parquet` may still be an `.arrows`
    sequences: int | None = None  # rows that it trained; None in a manifest of an older version
    selected: int | None = None  # of these, those that were to be written
    records: int = 0  # and those that were
    complete: bool | None = None  # every selected one was written
    tokens: int = 0
    trained_tokens: int = 0
    end: int = 0  # bytes of the file after this iteration; of a part that is open, those of the stream
    error: str | None = None  # why records are missing


class ExportedStep(Record, kw_only=True):
    """A line of the manifest."""

    schema_version: int = SCHEMA_VERSION
    run_id: str
    attempt: int
    split: str
    iteration: int
    batch: int  # a checkpoint of this batch or a later one contains it
    format: str
    loss: dict[str, Any]
    # Of each optimiser step: whether it changed the weights, so whether all was finite; None: not known.
    applied: list[bool] | None = None
    columns: list[str]
    fraction: float
    sequences: int  # rows that were trained, in all optimiser steps and processes
    selected: int  # of these, those that were to be written
    records: int  # and those that were
    tokens: int
    trained_tokens: int
    complete: bool  # every selected one was written, by every process
    ranks: list[RankPart]


def sums_of(parts: list[RankPart]) -> dict[str, Any]:
    """What a line of the manifest says of all processes together, and of each."""
    return {
        "sequences": sum(part.sequences or 0 for part in parts),
        "selected": sum(part.selected or 0 for part in parts),
        "records": sum(part.records for part in parts),
        "tokens": sum(part.tokens for part in parts),
        "trained_tokens": sum(part.trained_tokens for part in parts),
        "complete": all(part.complete for part in parts),
        "ranks": parts,
    }


class ManifestWriter:
    """The one writer of a manifest. A line that a full disk refuses waits, and is tried again before the
    next."""

    def __init__(self, path: Path) -> None:
        self._lines = JsonlWriter(path, check=False)
        self._waiting: list[ExportedStep] = []

    def append(self, step: ExportedStep) -> None:
        """Raises a WriteError where a line has to wait."""
        self._waiting.append(step)
        self._flush()

    def replace_last(self, step: ExportedStep) -> None:
        """Put another line in the place of the last one that waits."""
        self._waiting[-1] = step
        self._flush()

    def close(self) -> None:
        try:
            self._flush()
        finally:
            self._lines.close()

    def _flush(self) -> None:
        while self._waiting:
            self._lines.append(self._waiting[0].encode())
            del self._waiting[0]
        self._lines.sync()


class ExportFiles(NamedTuple):
    """Where an export is: a directory, and what every name in it begins with."""

    directory: Path
    prefix: str = ""

    @property
    def manifest(self) -> Path:
        return self.directory / f"{self.prefix}{MANIFEST}"

    def lines_of(self, rank: int) -> Path:
        """The JSON lines of one process."""
        return self.directory / f"{self.prefix}rank_{rank}.jsonl"

    def part_of(self, rank: int, iteration: int, ending: str = PARQUET) -> Path:
        """The part of one process that begins with an iteration."""
        return self.directory / f"{self.prefix}rank_{rank}_{iteration:06d}{ending}"

    def data_files(self) -> list[tuple[int, int | None, Path]]:
        """(process, first iteration of a part, path) of every file here that holds records."""
        if not self.directory.is_dir():
            return []
        found = []
        for path in sorted(self.directory.iterdir()):
            match = _RANK_FILE.fullmatch(path.name.removeprefix(self.prefix))
            if match and path.name.startswith(self.prefix):
                found.append((int(match[1]), None if match[2] is None else int(match[2]), path))
        return found


def export_files(root: Path, settings: TokenExportSettings) -> ExportFiles:
    """`a/x.jsonl` stands for files called `a/x_rank_N.jsonl`, a path without an ending for a directory."""
    if settings.path is None:
        return ExportFiles(root / TOKEN_EXPORTS)
    path = root / Path(settings.path).expanduser()  # an absolute one stays as it is
    if not path.suffix:
        return ExportFiles(path)
    if path.suffix != f".{settings.format}":
        raise UsageError(
            f"token_export.path {settings.path!r} does not end in .{settings.format}; set format as well, or "
            "name a directory"
        )
    return ExportFiles(path.parent, f"{path.stem}_")


def files_of_manifest(manifest: Path) -> ExportFiles:
    return ExportFiles(manifest.parent, manifest.name.removesuffix(MANIFEST))


def on_disk(path: Path) -> Path:
    """A part of an export as it is now: a stream until it is closed, then Parquet."""
    other = path.with_suffix(STREAM if path.suffix == PARQUET else PARQUET)
    return other if path.suffix in (PARQUET, STREAM) and not path.exists() and other.exists() else path


def read_manifest(path: Path) -> Iterator[ExportedStep]:
    """The lines; a missing file holds none."""
    if not path.exists():
        return
    for line in read_lines(path):
        yield decode_step(path, line)


def decode_step(path: Path, line: Line) -> ExportedStep:
    """The line of a manifest, if this version can read it and it names no file elsewhere."""
    step = decode_record(path, line, ExportedStep)
    if why := made_by_newer(step.schema_version, SCHEMA_VERSION):
        raise BadFileError(path, f"line {line.number} {why}")
    for part in step.ranks:
        if part.file is not None and part.file != Path(part.file).name:
            raise BadFileError(path, f"line {line.number} names {part.file!r}, which is no file beside it")
    return step


def refuse_foreign(files: ExportFiles, *, run_id: str) -> None:
    """Raise where the files of another run, or of another program, stand in the way."""
    for step in read_manifest(files.manifest):
        if step.run_id != run_id:
            raise UsageError(
                f"{files.manifest} belongs to the run {step.run_id}; set token_export.path to another place, "
                "or move the old export away"
            )
    if not files.manifest.exists() and (found := files.data_files()):
        raise UsageError(
            f"{found[0][2]} is there already and belongs to no run of Rollbook; set token_export.path to "
            "another place, or move it away"
        )


class RewindPlan(NamedTuple):
    """How an export goes back to a checkpoint: what is cut to which length, and what is left out whole."""

    lengths: dict[Path, int]
    dropped: list[Path]


def plan_rewind(files: ExportFiles, *, batch: int) -> RewindPlan:
    """Back to a checkpoint of this batch; what is left out is written again by the iterations to come."""
    kept: dict[str, int] = {}
    plan = RewindPlan({}, [])
    if files.manifest.exists():
        plan.lengths[files.manifest] = 0
        for line in read_lines(files.manifest):
            step = decode_record(files.manifest, line, ExportedStep)
            if step.batch > batch:
                break
            kept |= {part.file: part.end for part in step.ranks if part.file is not None}
            plan.lengths[files.manifest] = line.end
    for _, _, path in files.data_files():
        final = path.with_suffix(PARQUET) if path.suffix == STREAM else path
        if final.name not in kept or (path.suffix == STREAM and final.exists()):
            plan.dropped.append(path)
        elif path.suffix != PARQUET:
            plan.lengths[path] = kept[final.name]
    return plan
