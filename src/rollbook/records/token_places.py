"""Where the token exports of a run are, and what of them counts.

A run names its manifests in run.json; what a manifest says counts and nothing else. Another trainer's export
has none: there every file below `token_exports/` counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rollbook.records.run_info import RunInfo
from rollbook.records.token_files import (
    MANIFEST,
    PARQUET,
    STREAM,
    TOKEN_EXPORTS,
    ExportedStep,
    files_of_manifest,
    read_manifest,
)
from rollbook.records.tokens import TokenSequence, read_sequences

_STEP = re.compile(r"step_(\d+)")  # prime-rl's directory of a step


class TokenFile(NamedTuple):
    """A file with records. `end` and `last` are None where all of it counts."""

    path: Path
    end: int | None = None  # in bytes
    last: int | None = None  # the last iteration that counts
    has_manifest: bool = True


class _Piece(NamedTuple):
    """The records of one iteration in one file."""

    path: Path
    step: ExportedStep
    start: int
    end: int


def manifests_of(root: Path, info: RunInfo | None) -> list[Path]:
    """The manifests that are there."""
    named = info.extra.get(TOKEN_EXPORTS) if info is not None else None
    names = [*(named or ()), f"{TOKEN_EXPORTS}/{MANIFEST}"]
    return [path for path in dict.fromkeys(root / name for name in names) if path.is_file()]


def token_files(root: Path, info: RunInfo | None) -> list[TokenFile]:
    """Every file of the exports of a run; one that should be there and is not, too."""
    manifests = manifests_of(root, info)
    found = [file for manifest in manifests for file in files_of(manifest)]
    return found + [TokenFile(path, has_manifest=False) for path in _without_manifest(root, manifests)]


def files_of(manifest: Path) -> list[TokenFile]:
    last = {piece.path: piece for piece in _pieces(manifest)}
    return [
        TokenFile(path) if path.suffix == PARQUET else TokenFile(path, piece.end, piece.step.iteration)
        for path, piece in sorted(last.items())
    ]


def manifest_beside(path: Path) -> Path | None:
    """The manifest that a file with records belongs to."""
    prefix, mark, _ = path.name.rpartition("rank_")
    manifest = path.with_name(f"{prefix}{MANIFEST}")
    if not mark or not manifest.is_file():
        return None
    ours = {own for _, _, own in files_of_manifest(manifest).data_files()}
    return manifest if path in ours else None


def exported_sequences(
    root: Path, info: RunInfo | None, *, iteration: int | None = None, split: str | None = None
) -> Iterator[TokenSequence]:
    """The sequences of all exports of a run; of one iteration only its part of the files is read."""
    manifests = manifests_of(root, info)
    for manifest in manifests:
        if iteration is None:
            parts = [(file.path, 0, file.end) for file in files_of(manifest)]
        else:
            pieces = [piece for piece in _pieces(manifest) if piece.step.iteration == iteration]
            parts = [(piece.path, piece.start, piece.end) for piece in pieces if piece.end > piece.start]
        for path, start, end in parts:
            yield from _of_split(read_sequences(path, start=start, end=end, iteration=iteration), split)
    for path in _without_manifest(root, manifests):
        step = _STEP.fullmatch(path.parent.name)
        if iteration is None or step is None or int(step[1]) == iteration:
            yield from _of_split(read_sequences(path, iteration=iteration), split)


def exported_steps(root: Path, info: RunInfo | None) -> Iterator[ExportedStep]:
    """What the manifests say of every exported iteration."""
    for manifest in manifests_of(root, info):
        yield from read_manifest(manifest)


def _of_split(sequences: Iterator[TokenSequence], split: str | None) -> Iterator[TokenSequence]:
    return (sequence for sequence in sequences if split in (None, sequence.split))


def _without_manifest(root: Path, manifests: list[Path]) -> list[Path]:
    directory = root / TOKEN_EXPORTS
    if directory / MANIFEST in manifests or not directory.is_dir():
        return []
    paths = [path for ending in ("jsonl", "parquet") for path in directory.rglob(f"*.{ending}")]
    belonging = {file.path for manifest in manifests for file in files_of(manifest)} | set(manifests)
    return sorted(
        (path for path in paths if not path.name.startswith(".") and path not in belonging), key=_by_step
    )


def _by_step(path: Path) -> tuple[int, Path]:
    step = _STEP.fullmatch(path.parent.name)
    return (int(step[1]) if step else -1, path)


def _pieces(manifest: Path) -> Iterator[_Piece]:
    ends: dict[Path, int] = {}
    for step in read_manifest(manifest):
        for part in step.ranks:
            if part.file is not None:
                path = _on_disk(manifest.with_name(part.file))
                yield _Piece(path, step, ends.get(path, 0), part.end)
                ends[path] = part.end


def _on_disk(path: Path) -> Path:
    """A part that is not closed yet is a stream."""
    stream = path.with_suffix(STREAM)
    return stream if path.suffix == PARQUET and not path.exists() and stream.exists() else path
