"""A block of lines decoded at once, one object a line, without a loop over lines.

The decoder takes any white space between objects and within them. Where every newline stands between `}` and
`{` it stands between two objects, for within one there would be a comma; and as many objects as lines are
then one a line. Nor does the decoder look into text that it skips, so the encoding is checked beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import numpy as np

T = TypeVar("T")
Ints = np.ndarray[Any, np.dtype[np.int64]]


def decode_block(block: bytes, decode_lines: Callable[[bytes], list[T]]) -> tuple[list[T], Ints] | None:
    """The objects of whole lines, and where each line's newline is; None where something is odd."""
    data = np.frombuffer(block, dtype=np.uint8)
    ends = np.flatnonzero(data == ord("\n"))
    if block[-1:] != b"\n" or block[:1] != b"{" or np.any(data[ends - 1] != ord("}")):
        return None
    if np.any(data[ends[:-1] + 1] != ord("{")):
        return None
    try:
        if not block.isascii():
            block.decode()
        rows = decode_lines(block)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return (rows, ends) if len(rows) == len(ends) else None
