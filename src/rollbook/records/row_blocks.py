"""Rows in blocks, without a loop over lines: where lines begin and end, and what is in them.

A decoder takes any white space between objects and within them. Where every newline is between `}` and
`{` it is between two objects, for within one there would be a comma; and as many objects as lines are
then one per line. Nor does the decoder look into text that it skips, so the encoding is checked beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

T = TypeVar("T")
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Ints = np.ndarray[Any, np.dtype[np.int64]]

_BLOCK = 1 << 20
_NEWLINE, _OPEN, _CLOSE = ord("\n"), ord("{"), ord("}")
_ASCII = 128


class LineBlock(NamedTuple):
    """Whole lines: their bytes, and where each begins and ends in them."""

    offset: int  # of the bytes in the file
    data: Bytes
    starts: Ints
    ends: Ints  # without the newline

    @property
    def has_last_newline(self) -> bool:
        """False at the end of a file that does not end with one."""
        return int(self.ends[-1]) < len(self.data)


def line_blocks(path: Path, *, end: int | None = None, size: int = _BLOCK) -> Iterator[LineBlock]:
    """The lines of a file up to `end`; a block is good until the next one is asked for."""
    buffer = bytearray(size)
    offset = carried = 0
    with path.open("rb", buffering=0) as file:
        while True:
            room = memoryview(buffer)[carried:]
            if not (read := file.readinto(room if end is None else room[: max(0, end - offset - carried)])):
                break
            filled = carried + read
            data = np.frombuffer(buffer, dtype=np.uint8)
            newlines = np.flatnonzero(data[:filled] == _NEWLINE)
            if len(newlines):
                cut = int(newlines[-1]) + 1
                yield _block(offset, data[:cut], newlines)
                rest = data[cut:filled].tobytes()
                buffer[: len(rest)] = rest
                offset, filled = offset + cut, len(rest)
            carried = filled
            if carried == len(buffer):  # a line longer than all that was read
                buffer = buffer + bytearray(len(buffer))
    if carried:
        yield _block(offset, np.frombuffer(buffer, dtype=np.uint8)[:carried], np.array([carried]))


def odd_lines(block: LineBlock) -> Ints:
    """Lines that do not begin with { and end with }: blank, indented, torn, or no rows at all."""
    _, data, starts, ends = block
    begins = data[np.minimum(starts, len(data) - 1)] == _OPEN
    closes = data[np.maximum(ends - 1, 0)] == _CLOSE
    found: Ints = np.flatnonzero(~(begins & closes & (ends > starts)))
    return found


def decode_block(block: LineBlock, decode_lines: Callable[[memoryview], list[T]]) -> list[T] | None:
    """The objects of the lines, one per line; None where something is odd."""
    if len(odd_lines(block)):
        return None
    data = block.data.data
    try:
        if block.data.max() >= _ASCII:
            str(data, "utf-8")
        rows = decode_lines(data)
    except (ValueError, RecursionError):  # the decoder's errors and wrong UTF-8 are values' errors
        return None
    return rows if len(rows) == len(block.ends) else None


def _block(offset: int, data: Bytes, ends: Ints) -> LineBlock:
    starts = np.empty_like(ends)
    starts[0], starts[1:] = 0, ends[:-1] + 1
    return LineBlock(offset, data, starts, ends)
