"""Where each row of a source stands, so that a few rows of many can be read without reading the others.

One pass finds the newlines by blocks and checks how every line begins and ends; the places go to a temporary
file, 16 bytes a row. Compressed lines and Parquet have no places to jump to: they are first written out as
plain lines.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from rollbook.data.shuffle import Words
from rollbook.errors import BadLineError
from rollbook.records.jsonl import read_lines
from rollbook.records.row_blocks import line_blocks, odd_lines
from rollbook.records.rows import COMPRESSED, Progress, Row, RowCount, read_rows

_BLOCK = 1 << 20
_READ_AHEAD = 1 << 14
_PLACE_BYTES = 16


class Indexed(NamedTuple):
    path: Path  # as it was named
    lines: Path  # the plain lines of it: itself, or a copy
    first: int  # the number of its first row within the source
    rows: int
    blank: int


class Found(NamedTuple):
    """A row that was asked for: its number within the source, its bytes and what they say."""

    number: int
    data: bytes
    value: dict[str, Any]


class RowIndex:
    """The rows of one source, its files one after another, by number from 0."""

    def __init__(self, paths: list[Path], directory: Path, advance: Progress = lambda _: None) -> None:
        self._places_path = _new_name(directory, "places")
        self.files: list[Indexed] = []
        self.rows = 0
        with self._places_path.open("xb") as places:
            for path in paths:
                if path.suffix in COMPRESSED or path.suffix == ".parquet":
                    lines, skipped = _plain_copy(path, directory, advance)
                    blank = skipped + _index(lines, path, places, lambda _: None)
                else:
                    lines, blank = path, _index(path, path, places, advance)
                rows = places.tell() // _PLACE_BYTES - self.rows
                self.files.append(Indexed(path, lines, self.rows, rows, blank))
                self.rows += rows

    def read(self, blocks: Iterable[Words]) -> Iterator[Found]:
        """The rows of these numbers, which ascend."""
        later = iter(self.files)
        with contextlib.ExitStack() as opened:
            current, file = None, None
            for numbers in blocks:
                for number, (start, end) in zip(numbers.tolist(), self._places(numbers), strict=True):
                    while current is None or file is None or number >= current.first + current.rows:
                        opened.close()
                        current = next(later)
                        file = opened.enter_context(current.lines.open("rb", buffering=_READ_AHEAD))
                    file.seek(start)
                    data = file.read(end - start)
                    yield Found(number, data, _value(data, current.path, current.lines, start))

    def refuse(self, number: int, why: str) -> BadLineError:
        """An error that names the line of a row."""
        of = next(file for file in self.files if number < file.first + file.rows)
        [[start, _]] = self._places(np.array([number], dtype=np.uint64))
        return BadLineError(of.path, _line_number(of.lines, start), why)

    def _places(self, numbers: Words) -> list[list[int]]:
        """Start and end of each; only the part of the index that these numbers span is read."""
        if not len(numbers):
            return []
        first, last = int(numbers[0]), int(numbers[-1])
        spanned = np.fromfile(
            self._places_path, dtype=np.int64, count=2 * (last - first + 1), offset=first * _PLACE_BYTES
        )
        chosen: list[list[int]] = spanned.reshape(-1, 2)[(numbers - numbers[0]).astype(np.int64)].tolist()
        return chosen


def _plain_copy(path: Path, directory: Path, advance: Progress) -> tuple[Path, int]:
    """The rows as lines, checked, and how many blank lines were left out."""
    seen = RowCount()
    copy = _new_name(directory, "lines")
    with copy.open("xb", buffering=_BLOCK) as target:
        for row in read_rows(path, progress=advance, count=seen):
            row.value()
            target.write(row.data + b"\n")
    return copy, seen.blank


def _index(lines: Path, path: Path, places: IO[bytes], advance: Progress) -> int:
    """Append start and end of each line that holds a row; returns how many lines are blank."""
    blank = 0
    for block in line_blocks(lines):
        offset, data, starts, ends = block
        pairs = np.column_stack([starts, ends])
        if len(odd := odd_lines(block)):
            holds_row = np.ones(len(ends), dtype=bool)
            for number in odd.tolist():
                text = data[starts[number] : ends[number]].tobytes()
                if not text or text.isspace():
                    holds_row[number] = False
                else:
                    _value(text, path, lines, offset + int(starts[number]))
            pairs = pairs[holds_row]
            blank += len(ends) - len(pairs)
        (pairs + offset).tofile(places)
        advance(len(data))
    return blank


def _value(data: bytes, path: Path, lines: Path, start: int) -> dict[str, Any]:
    try:
        return Row(data, path, 0).value()
    except BadLineError as error:
        raise BadLineError(path, _line_number(lines, start), error.why) from None


def _line_number(lines: Path, start: int) -> int:
    """Counted only where an error needs it."""
    return next(line.number for line in read_lines(lines, accept_tail=True) if line.start >= start)


def _new_name(directory: Path, kind: str) -> Path:
    return directory / f"{kind}-{sum(1 for _ in directory.iterdir())}"
