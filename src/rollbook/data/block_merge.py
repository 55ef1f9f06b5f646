"""Plain files of our own rows into one, checked and copied at once.

Parsing every row takes the longest and holds the interpreter's lock, so copies of this process do that, part
by part, while this one takes the digests of the files and writes them; then it helps with the parts that are
left. The disk begins meanwhile with what is written, to spare the end.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from rollbook.data.job import DataJob
from rollbook.data.output import RowOutput
from rollbook.data.quick_check import Keys, NotQuick, hashes_of_keys
from rollbook.forked import SharedWork
from rollbook.records.row_blocks import line_blocks, line_parts
from rollbook.records.rows import Progress

_FEW_BYTES = 16 << 20  # are not worth a process
_PART_BYTES = 32 << 20
_PIECE = 1 << 18
_PUSH_EVERY = 256 << 20


class _Part(NamedTuple):
    """Some whole lines of a file."""

    path: Path
    start: int
    end: int


def merge_blocks(job: DataJob, directory: Path, advance: Progress) -> None:
    """Write all rows of the inputs as they are, with the newline a file may lack; or raise NotQuick."""
    assert job.output is not None
    parts = [_Part(path, *place) for path in job.paths for place in line_parts(path, _PART_BYTES)]
    sizes = {part.path: part.end for part in parts}  # of a file that grows, no more than that
    check, copier = _Check(parts, directory), _Copier(job.output, advance)
    few = sum(sizes.values()) < _FEW_BYTES
    with closing(SharedWork(check.part, len(parts), copies=0 if few else None)) as work:
        for path, size in sizes.items():
            if check.has_doubts:
                raise NotQuick
            digest, is_whole = copier.copy(path, size)
            job.set_digest(path, digest)
            if not is_whole:
                job.count("newlines_added")
        rows = work.result()
    if check.has_doubts or not check.are_keys_different():
        raise NotQuick
    for part, count in zip(parts, rows, strict=True):
        job.set_rows(part.path, job.rows_of(part.path) + count)
    job.output.rows = job.rows_in


class _Check:
    """Parses parts, in this process or a copy of it; of doubts all hear by memory that they share."""

    def __init__(self, parts: Sequence[_Part], directory: Path) -> None:
        self._parts, self._directory = parts, directory
        self._doubts = mmap.mmap(-1, 1)

    @property
    def has_doubts(self) -> bool:
        return self._doubts[0] != 0

    def part(self, number: int) -> int:
        """How many rows it has; the hashes of their keys are put aside."""
        path, start, end = self._parts[number]
        rows = seen = 0
        with self._keys_of(number).open("wb") as keys:
            for block in line_blocks(path, start=start, end=end):
                hashes = None if self.has_doubts else hashes_of_keys(block)
                if hashes is None:
                    break
                hashes.tofile(keys)
                rows, seen = rows + len(hashes), seen + len(block.data)
        if seen != end - start:
            self._doubts[0] = 1
        return rows

    def are_keys_different(self) -> bool:
        keys = Keys(self._directory)
        for number in range(len(self._parts)):
            keys.add(np.fromfile(self._keys_of(number), dtype=np.int64))
        return keys.are_different()

    def _keys_of(self, number: int) -> Path:
        return self._directory / f"keys-{number}"


class _Copier:
    """Copies file after file behind each other, and takes their digests on the way."""

    def __init__(self, output: RowOutput, advance: Progress) -> None:
        self._output, self._advance = output, advance
        self._written = self._pushed = 0

    def copy(self, path: Path, size: int) -> tuple[str, bool]:
        """The file's digest, and whether its last line has a newline; one is added if not."""
        digest = xxhash.xxh3_128()
        buffer = memoryview(bytearray(_PIECE))
        last = b"\n"
        with path.open("rb", buffering=0) as file:
            while size > 0 and (read := file.readinto(buffer[:size])):
                piece = buffer[:read]
                digest.update(piece)
                self._write(piece)
                size, last = size - read, bytes(piece[-1:])
        if size:
            raise NotQuick  # someone has cut it short
        is_whole = last == b"\n"
        if not is_whole:
            self._write(memoryview(b"\n"))
        return digest.hexdigest(), is_whole

    def _write(self, piece: memoryview) -> None:
        self._output.write_block(piece, 0)
        self._advance(len(piece))
        self._written += len(piece)
        if self._written - self._pushed >= _PUSH_EVERY:
            self._output.push_to_disk(self._pushed, self._written - self._pushed)
            self._pushed = self._written
