"""Where lines begin and end, by the block, as fast as memory allows.

The comparison with the newline is looked at eight bytes at a time: in rows of some length almost all of them
hold none, and the place within eight is sought only where there is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_BLOCK = 1 << 19  # small enough for the processor's cache
_NEWLINE = ord("\n")
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Places = np.ndarray[Any, np.dtype[np.int64]]


class LineBlock(NamedTuple):
    """Whole lines: their bytes, good until the next block, and where each begins and ends in them."""

    offset: int  # of the bytes in the file
    data: Bytes
    starts: Places
    ends: Places  # without the newline


def line_blocks(path: Path, size: int = _BLOCK) -> Iterator[LineBlock]:
    offset, carried = 0, 0
    data = np.empty(size, dtype=np.uint8)
    with path.open("rb", buffering=0) as file:
        while read := file.readinto(data.data[carried:]):
            filled = carried + read
            newlines = _newlines(data[:filled])
            if len(newlines):
                end = int(newlines[-1]) + 1
                yield _block(offset, data[:end], newlines)
                data[: filled - end] = data[end:filled].copy()
                offset, filled = offset + end, filled - end
            carried = filled
            if carried == len(data):  # a line longer than all that was read
                data = np.concatenate([data, np.empty_like(data)])
    if carried:
        yield _block(offset, data[:carried], np.array([carried]))


def _block(offset: int, data: Bytes, ends: Places) -> LineBlock:
    starts = np.empty_like(ends)
    starts[0], starts[1:] = 0, ends[:-1] + 1
    return LineBlock(offset, data, starts, ends)


def _newlines(data: Bytes) -> Places:
    found = np.zeros(-(-len(data) // 8) * 8, dtype=bool)
    np.equal(data, _NEWLINE, out=found[: len(data)])
    eights = np.flatnonzero(found.view(np.uint64))
    which, within = np.nonzero(found.reshape(-1, 8)[eights])
    places: Places = eights[which] * 8 + within
    return places
