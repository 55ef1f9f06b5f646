"""Whole blocks of our own rows checked at once: every line a JSON object, with a key that no other row has.

It says only whether all is well. Where it is not, the reader that goes row by row decides, and names the
place. One thing it takes that the other does not: a number too large for a float, such as 1e999.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rollbook.records.row_blocks import LineBlock, decode_block
from rollbook.records.row_keys import KEY

_OUR_ROW = b'{"' + KEY.encode() + b'":"'
_HELD = 1 << 22  # hashes of keys, of eight bytes each
_BUCKETS = 64

Hashes = np.ndarray[Any, np.dtype[np.int64]]


class NotQuick(Exception):
    """The quick check has doubts; whoever reads row by row will say which."""


class _Keyed(msgspec.Struct, gc=False):
    """All that is taken from a row; the rest is parsed and left."""

    key: str = msgspec.field(name=KEY)


_decode = msgspec.json.Decoder(_Keyed).decode_lines


def can_be_quick(paths: Sequence[Path]) -> bool:
    return all(path.suffix in (".jsonl", ".ndjson") and _begins_like_ours(path) for path in paths)


def hashes_of_keys(block: LineBlock) -> Hashes | None:
    """Of the rows of a block, good within this process and its copies; None where there are doubts."""
    rows = decode_block(block, _decode)
    return None if rows is None else np.array([hash(row.key) for row in rows], dtype=np.int64)


class Keys:
    """Any number of hashes: held, and once they are many, aside in files by their last bits."""

    def __init__(self, directory: Path) -> None:
        self._paths = [directory / f"hashes-{bucket}" for bucket in range(_BUCKETS)]
        self._held: list[Hashes] = []
        self._count = 0
        self._are_aside = False

    def add(self, hashes: Hashes) -> None:
        self._held.append(hashes)
        self._count += len(hashes)
        if self._count >= _HELD:
            self._put_aside()

    def are_different(self) -> bool:
        """Two keys may have one hash: a doubt, not an error."""
        if not self._are_aside:
            return _all_different(self._taken())
        self._put_aside()
        return all(_all_different(np.fromfile(path, dtype=np.int64)) for path in self._paths)

    def _taken(self) -> Hashes:
        hashes = np.concatenate([np.empty(0, dtype=np.int64), *self._held])
        self._held, self._count = [], 0
        return hashes

    def _put_aside(self) -> None:
        self._are_aside = True
        hashes = self._taken()
        bucket = hashes & (_BUCKETS - 1)
        for number, path in enumerate(self._paths):
            with path.open("ab") as file:
                hashes[bucket == number].tofile(file)


def _all_different(hashes: Hashes) -> bool:
    hashes.sort()
    return not bool((hashes[1:] == hashes[:-1]).any())


def _begins_like_ours(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_OUR_ROW)) in (_OUR_ROW, b"")
