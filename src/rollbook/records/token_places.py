"""Where the tokens of a run are, and what of it counts.

A run names the manifests of its exports in run.json; what a manifest says counts and nothing else. Another
trainer's export has none: there every file below `token_exports/` counts. A run without an export still has
the sampled side in its transcripts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from rollbook.records.layout import Artifact, RunFiles
from rollbook.records.run_info import RunInfo, read_run_info
from rollbook.records.token_files import (
    MANIFEST,
    PARQUET,
    TOKEN_EXPORTS,
    ExportedStep,
    files_of_manifest,
    on_disk,
    read_manifest,
)
from rollbook.records.tokens import TokenSequence, read_sequences

_STEP = re.compile(r"step_(\d+)")  # prime-rl's directory of a step


class TokenFile(NamedTuple):
    """A file with records. `end` and `last` are None where all of it counts."""

    path: Path
    end: int | None = None  # in bytes
    last: int | None = None  # the last iteration that counts


class TokenPiece(NamedTuple):
    """A part of a file: the records of one iteration, or of any where `iteration` is None."""

    path: Path
    iteration: int | None = None
    start: int = 0
    end: int | None = None
    split: str | None = None  # None: each record says it
    is_transcript: bool = False

    def read(self, columns: Collection[str] | None = None) -> Iterator[TokenSequence]:
        if self.is_transcript:
            from rollbook.records.sampled_tokens import sampled_sequences

            return sampled_sequences(self.path)
        return read_sequences(
            self.path, start=self.start, end=self.end, iteration=self.iteration, columns=columns
        )


class TokenSource(NamedTuple):
    """A run, or one file or directory of its export."""

    root: Path
    info: RunInfo | None = None
    only: Path | None = None

    @property
    def is_exported(self) -> bool:
        """Whether a trainer wrote it; else there is the sampled side at most."""
        if self.only is not None and self.only.is_file():
            return not self.only.name.endswith(Artifact.TRANSCRIPTS)
        manifests = manifests_of(self.root, self.info)
        return bool(manifests) or bool(_without_manifest(self.root, manifests))

    def pieces(self) -> list[TokenPiece]:
        """What there is to read, file by file."""
        if self.only is not None and self.only.is_file():
            return _pieces_of_file(self.only)
        manifests = manifests_of(self.root, self.info)
        found = [piece for manifest in manifests for piece in _pieces(manifest)]
        found += [_foreign(path) for path in _without_manifest(self.root, manifests)]
        if not manifests and not found:
            found = _transcripts(self.root)
        only = self.only
        return [piece for piece in found if only is None or piece.path.is_relative_to(only)]

    def steps(self) -> Iterator[ExportedStep]:
        """What the manifests say of every exported iteration."""
        for manifest in manifests_of(self.root, self.info):
            yield from read_manifest(manifest)


def token_source(path: Path) -> TokenSource:
    """Where to read the tokens of a run, of `token_exports/` or a directory in it, or of one file."""
    inside = next((above for above in (path, *path.parents) if above.name == TOKEN_EXPORTS), None)
    root = inside.parent if inside is not None else path.parent if path.is_file() else path
    marker = root / "run.json"
    info = read_run_info(marker) if marker.is_file() else None
    return TokenSource(root, info, path if path != root else None)


def whole_pieces(pieces: Iterable[TokenPiece]) -> Iterator[TokenPiece]:
    """The same with what can be read in one go as one piece. Of a Parquet file this may read more than was
    asked for, so whoever chose among the pieces looks at the iteration of what comes."""
    for path, parts in groupby(pieces, key=lambda piece: piece.path):
        first, *others = parts
        for piece in others:
            if path.suffix == PARQUET or piece.start == first.end:
                first = first._replace(end=piece.end, iteration=None)
            else:
                yield first
                first = piece
        yield first


def manifests_of(root: Path, info: RunInfo | None) -> list[Path]:
    """The manifests that are there."""
    named = info.extra.get(TOKEN_EXPORTS) if info is not None else None
    names = [*(named or ()), f"{TOKEN_EXPORTS}/{MANIFEST}"]
    return [path for path in dict.fromkeys(root / name for name in names) if path.is_file()]


def files_of(manifest: Path) -> list[TokenFile]:
    last = {piece.path: piece for piece in _pieces(manifest)}
    return [
        TokenFile(path) if path.suffix == PARQUET else TokenFile(path, piece.end, piece.iteration)
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
    source = TokenSource(root, info)
    pieces = source.pieces() if source.is_exported else []
    wanted = [piece for piece in pieces if iteration is None or piece.iteration in (None, iteration)]
    for piece in whole_pieces(wanted):
        for sequence in piece.read():
            if iteration in (None, sequence.iteration) and split in (None, sequence.split):
                yield sequence


def exported_steps(root: Path, info: RunInfo | None) -> Iterator[ExportedStep]:
    """What the manifests say of every exported iteration."""
    return TokenSource(root, info).steps()


def _pieces_of_file(path: Path) -> list[TokenPiece]:
    if path.name.endswith(Artifact.TRANSCRIPTS):
        return [TokenPiece(path, is_transcript=True)]
    if path.name.endswith(MANIFEST):
        return _pieces(path)
    manifest = manifest_beside(path)
    if manifest is None:
        return [_foreign(path)]
    return [piece for piece in _pieces(manifest) if piece.path == path]


def _transcripts(root: Path) -> list[TokenPiece]:
    found = [file for file in RunFiles(root).iteration_files() if file.artifact is Artifact.TRANSCRIPTS]
    found.sort(key=lambda file: (file.iteration, file.split))
    return [TokenPiece(file.path, file.iteration, split=file.split, is_transcript=True) for file in found]


def _without_manifest(root: Path, manifests: list[Path]) -> list[Path]:
    directory = root / TOKEN_EXPORTS
    if directory / MANIFEST in manifests or not directory.is_dir():
        return []
    paths = [path for ending in ("jsonl", "parquet") for path in directory.rglob(f"*.{ending}")]
    belonging = {file.path for manifest in manifests for file in files_of(manifest)} | set(manifests)
    return sorted(
        (path for path in paths if not path.name.startswith(".") and path not in belonging), key=_by_step
    )


def _foreign(path: Path) -> TokenPiece:
    step = _STEP.fullmatch(path.parent.name)
    return TokenPiece(path, int(step[1]) if step else None)


def _by_step(path: Path) -> tuple[int, Path]:
    iteration = _foreign(path).iteration
    return (-1 if iteration is None else iteration, path)


def _pieces(manifest: Path) -> list[TokenPiece]:
    ends: dict[Path, int] = {}
    found = []
    for step in read_manifest(manifest):
        for part in step.ranks:
            if part.file is not None:
                path = on_disk(manifest.with_name(part.file))
                found.append(TokenPiece(path, step.iteration, ends.get(path, 0), part.end))
                ends[path] = part.end
    return sorted((piece for piece in found if piece.start != piece.end), key=lambda piece: piece[:4])
