"""Where each row of some files is, so that a few rows of many can be read without reading the others.

One pass finds the newlines by blocks and checks how every line begins and ends: 24 bytes are held for a row.
Compressed lines and Parquet have no places to jump to, and are read twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from rollbook.data.job import DataJob
from rollbook.records.identity import SeedPart, derive_seed
from rollbook.records.row_blocks import LineBlock, line_blocks, odd_lines
from rollbook.records.rows import COMPRESSED, Row, RowCount, read_rows

Ints = np.ndarray[Any, np.dtype[np.int64]]


def permutation(count: int, *seed: SeedPart) -> Ints:
    """A random order of so many things; NumPy has promised never to change this generator."""
    words = np.array([derive_seed(*seed)], dtype="<u8").view("<u4")
    return np.random.RandomState(words).permutation(count)


class RowPlaces:
    """The rows of some inputs of a job, one file after another, by number from 0."""

    def __init__(self, job: DataJob, paths: Sequence[Path]) -> None:
        self._job = job
        job.progress.begin("looking", sum(job.ends[path] for path in paths))
        self._files = [_File(path, *_places(job, path)) for path in paths]
        self._ends = np.cumsum([file.rows for file in self._files])
        self.rows = int(self._ends[-1]) if len(paths) else 0

    def read(self, numbers: Ints) -> Iterator[Row]:
        """The rows of these ascending numbers, each checked to be one."""
        for file, end in zip(self._files, self._ends.tolist(), strict=True):
            first = end - file.rows
            low, high = np.searchsorted(numbers, (first, end))
            yield from file.read(self._job, numbers[low:high] - first)


class _File(NamedTuple):
    path: Path
    rows: int
    spans: Ints | None  # of each row of a plain file where it starts and ends, and the number of its line

    def read(self, job: DataJob, numbers: Ints) -> Iterator[Row]:
        if self.spans is None:
            wanted = set(numbers.tolist())
            rows = read_rows(self.path) if wanted else iter(())
            for row in (row for number, row in enumerate(rows) if number in wanted):
                row.check()
                yield row
            return
        with self.path.open("rb", buffering=0) as file:
            for start, end, line in self.spans[numbers].tolist():
                file.seek(start)
                row = Row(file.read(end - start), self.path, line)
                row.check()
                yield row


def _places(job: DataJob, path: Path) -> tuple[int, Ints | None]:
    if path.suffix in COMPRESSED or path.suffix == ".parquet":
        return sum(1 for _ in job.rows_of(path)), None
    digest, lines, found = xxhash.xxh3_128(), 0, [np.empty((0, 3), dtype=np.int64)]
    for block in line_blocks(path, end=job.ends[path]):
        digest.update(block.data.data)
        job.progress.advance(len(block.data))
        found.append(_spans(block, path, lines))
        lines += len(block.ends)
    spans = np.concatenate(found)
    job.note_read(path, RowCount(len(spans), lines - len(spans)), digest.hexdigest())
    return len(spans), spans


def _spans(block: LineBlock, path: Path, lines: int) -> Ints:
    """Where rows are: blank lines are none, and any other that does not look like one must be one."""
    blank = []
    for place in odd_lines(block).tolist():
        text = block.data[block.starts[place] : block.ends[place]].tobytes()
        if not text or text.isspace():
            blank.append(place)
        else:
            Row(text, path, lines + place + 1).check()
    numbers = np.arange(lines + 1, lines + 1 + len(block.ends))
    spans = np.column_stack([block.starts + block.offset, block.ends + block.offset, numbers])
    return np.delete(spans, blank, axis=0)
