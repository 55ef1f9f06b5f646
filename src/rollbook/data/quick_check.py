"""Whole blocks of our own rows checked at once: every line a JSON object, with a key that no other row has.

It says only whether all is well. Where it is not, the reader that goes row by row decides, and names the
place. One thing it takes that the other does not: a number too large for a float, such as 1e999.

Between a closing and an opening bracket JSON has a comma or, between two documents, nothing but space. So if
every newline stands between `}` and `{`, and there are as many objects as lines, each line is one object.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from rollbook.data.line_blocks import LineBlock, line_blocks, odd_lines
from rollbook.records.row_keys import KEY

_OUR_ROW = b'{"' + KEY.encode() + b'":"'
_ASCII = 128
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


class Part(NamedTuple):
    """Some files whose lines are all rows with keys: how many they are, and hashes of their keys.

    Hashes that are too many to be held are in files of `aside`.
    """

    rows: dict[Path, int]
    hashes: Hashes
    aside: Path | None


def check_files(paths: Sequence[Path], directory: Path, block_size: int = 1 << 20) -> Part | None:
    """None where there are doubts: this runs in another process, which an exception does not leave."""
    directory.mkdir(exist_ok=True)
    keys = _Keys(directory)
    rows = {}
    try:
        for path in paths:
            rows[path] = sum(_take(block, keys) for block in line_blocks(path, block_size))
    except NotQuick:
        return None
    return Part(rows, keys.taken(), directory if keys.are_aside else None)


def together(parts: Sequence[Part | None], directory: Path) -> dict[Path, int]:
    """The rows of each file; raises NotQuick unless all keys differ. Two keys may have one hash: a doubt."""
    directory.mkdir(exist_ok=True)
    keys = _Keys(directory)
    rows: dict[Path, int] = {}
    for part in parts:
        if part is None:
            raise NotQuick
        rows |= part.rows
        keys.add(part.hashes)
    if not keys.are_different([part.aside for part in parts if part and part.aside]):
        raise NotQuick
    return rows


def _take(block: LineBlock, keys: _Keys) -> int:
    data = block.data.data
    try:
        if len(odd_lines(block)):
            raise NotQuick
        if block.data.max() >= _ASCII:
            str(data, "utf-8")  # the parser does not look at bytes of text that it leaves
        rows = _decode(data)
    except (ValueError, RecursionError):  # msgspec's errors and wrong UTF-8 are values' errors
        raise NotQuick from None
    if len(rows) != len(block.ends):
        raise NotQuick
    keys.add(np.array([hash(row.key) for row in rows], dtype=np.int64))
    return len(rows)


class _Keys:
    """Any number of hashes: held, and once they are many, aside in files by their last bits."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._held: list[Hashes] = []
        self._count = 0
        self.are_aside = False

    def add(self, hashes: Hashes) -> None:
        self._held.append(hashes)
        self._count += len(hashes)
        if self._count >= _HELD:
            self._put_aside()

    def taken(self) -> Hashes:
        """Those that are held, which are not any more."""
        hashes = np.concatenate([np.empty(0, dtype=np.int64), *self._held])
        self._held, self._count = [], 0
        return hashes

    def are_different(self, others: Sequence[Path]) -> bool:
        """Also from those of others, by where these are aside."""
        if not self.are_aside and not others:
            return _all_different(self.taken())
        self._put_aside()
        return all(
            _all_different(np.concatenate([_read(bucket, place) for place in (self._directory, *others)]))
            for bucket in range(_BUCKETS)
        )

    def _put_aside(self) -> None:
        self.are_aside = True
        hashes = self.taken()
        of = hashes & (_BUCKETS - 1)
        for bucket in range(_BUCKETS):
            with _file_of(bucket, self._directory).open("ab") as file:
                hashes[of == bucket].tofile(file)


def _file_of(bucket: int, directory: Path) -> Path:
    return directory / f"hashes-{bucket}"


def _read(bucket: int, directory: Path) -> Hashes:
    hashes: Hashes = np.fromfile(_file_of(bucket, directory), dtype=np.int64)
    return hashes


def _all_different(hashes: Hashes) -> bool:
    hashes.sort()
    return not bool((hashes[1:] == hashes[:-1]).any())


def _begins_like_ours(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_OUR_ROW)) in (_OUR_ROW, b"")
