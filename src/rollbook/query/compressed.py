"""Whether a compressed file is all there.

DuckDB takes a zstd file that was cut short for an empty one, and says nothing. The format tells without
decompression: a frame is a header and blocks that say how long they are and which is the last (RFC 8878).
Of a gzip file DuckDB finds out by itself.
"""

from __future__ import annotations

import os
from pathlib import Path

from rollbook.errors import BadFileError

_FRAME = 0xFD2FB528
_SKIPPED, _SKIPPED_MASK = 0x184D2A50, 0xFFFFFFF0
_DICTIONARY_BYTES = (0, 1, 2, 4)
_CONTENT_SIZE_BYTES = (0, 2, 4, 8)
_REPEATED_BYTE = 1  # the type of a block that holds one byte, whatever its size


def check_is_whole(path: Path) -> None:
    """Raise if the end of a zstd file is missing; what else may be wrong DuckDB says."""
    if path.suffix != ".zst":
        return
    with path.open("rb") as file:
        descriptor, size = file.fileno(), path.stat().st_size
        end = 0
        while end < size:
            magic = _number(descriptor, end, 4)
            if magic == _FRAME:
                end = _end_of_frame(descriptor, end + 4, size)
            elif magic & _SKIPPED_MASK == _SKIPPED:
                end += 8 + _number(descriptor, end + 4, 4)
            elif size - end >= 4:
                return
            else:
                end += 4
    if end > size:
        raise BadFileError(path, "is cut short: its compressed data has no end; copy or make it again")


def _end_of_frame(descriptor: int, start: int, size: int) -> int:
    """Where a frame ends, which is after the end of the file if that is missing."""
    flags = _number(descriptor, start, 1)
    is_single, has_checksum = flags >> 5 & 1, flags >> 2 & 1
    content_size = _CONTENT_SIZE_BYTES[flags >> 6] or is_single
    place = start + 2 - is_single + _DICTIONARY_BYTES[flags & 3] + content_size
    is_last = 0
    while not is_last:
        if place + 3 > size:
            return size + 1
        block = _number(descriptor, place, 3)
        is_last, kind = block & 1, block >> 1 & 3
        place += 3 + (1 if kind == _REPEATED_BYTE else block >> 3)
    return place + 4 * has_checksum


def _number(descriptor: int, offset: int, length: int) -> int:
    return int.from_bytes(os.pread(descriptor, length, offset), "little")
