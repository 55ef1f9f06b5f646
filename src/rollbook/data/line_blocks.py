"""Where lines begin and end, by the block, as fast as memory allows.

Long lines are walked from newline to newline, which skips what is between them; short ones are compared with
the newline all at once, eight bytes at a time, because almost all of those hold none.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_BLOCK = 1 << 20
_NEWLINE, _OPEN, _CLOSE = ord("\n"), ord("{"), ord("}")
_LONG = 400  # bytes of a line from which walking is the quicker way, measured
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Places = np.ndarray[Any, np.dtype[np.int64]]


class LineBlock(NamedTuple):
    """Whole lines: their bytes, and where each begins and ends in them."""

    offset: int  # of the bytes in the file
    data: Bytes
    starts: Places
    ends: Places  # without the newline


def line_blocks(path: Path, size: int = _BLOCK) -> Iterator[LineBlock]:
    """A block is good until the next one is asked for."""
    buffer = bytearray(size)
    offset, carried, walks = 0, 0, True
    with path.open("rb", buffering=0) as file:
        while read := file.readinto(memoryview(buffer)[carried:]):
            filled = carried + read
            data = np.frombuffer(buffer, dtype=np.uint8)
            newlines = _walked(buffer, filled) if walks else _compared(data[:filled])
            walks = filled >= _LONG * len(newlines)
            if len(newlines):
                end = int(newlines[-1]) + 1
                yield _block(offset, data[:end], newlines)
                rest = data[end:filled].tobytes()
                buffer[: len(rest)] = rest
                offset, filled = offset + end, len(rest)
            carried = filled
            if carried == len(buffer):  # a line longer than all that was read
                buffer = buffer + bytearray(len(buffer))
    if carried:
        yield _block(offset, np.frombuffer(buffer, dtype=np.uint8)[:carried], np.array([carried]))


def odd_lines(block: LineBlock) -> Places:
    """Lines that do not begin with { and end with }: blank, indented, torn, or no rows at all."""
    _, data, starts, ends = block
    begins = data[np.minimum(starts, len(data) - 1)] == _OPEN
    closes = data[np.maximum(ends - 1, 0)] == _CLOSE
    found: Places = np.flatnonzero(~(begins & closes & (ends > starts)))
    return found


def _block(offset: int, data: Bytes, ends: Places) -> LineBlock:
    starts = np.empty_like(ends)
    starts[0], starts[1:] = 0, ends[:-1] + 1
    return LineBlock(offset, data, starts, ends)


def _walked(buffer: bytearray, end: int) -> Places:
    places: list[int] = []
    place = buffer.find(b"\n", 0, end)
    while place >= 0:
        places.append(place)
        place = buffer.find(b"\n", place + 1, end)
    return np.array(places, dtype=np.int64)


def _compared(data: Bytes) -> Places:
    found = np.zeros(-(-len(data) // 8) * 8, dtype=bool)
    np.equal(data, _NEWLINE, out=found[: len(data)])
    eights = np.flatnonzero(found.view(np.uint64))
    which, within = np.nonzero(found.reshape(-1, 8)[eights])
    places: Places = eights[which] * 8 + within
    return places
