"""Which rows say who they are and are not the first to say so, for any number of rows.

Each key's 128-bit hash goes, with the place of its row, to one of 64 files by its leading bits; equal keys
meet in the same file, and one file at a time is looked at. Two different keys with one hash do not happen.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from rollbook.data.shuffle import Words

_BUCKET_BITS = 6
_HELD = 1 << 16
_SHIFT = np.uint64(64 - _BUCKET_BITS)
Pairs = np.ndarray[Any, np.dtype[np.int64]]


class RepeatedKeys:
    """`add` the key of every row in order, then ask for `pairs` once."""

    def __init__(self, directory: Path) -> None:
        self._paths = [directory / f"keys-{bucket}" for bucket in range(1 << _BUCKET_BITS)]
        self._digests: list[bytes] = []
        self._places: list[int] = []
        self._row = 0

    def add(self, key: str | None) -> None:
        """None for a row without a key, which is never the same as another."""
        if key is not None:
            text = key.encode(errors="surrogatepass")
            self._digests.append(hashlib.blake2b(text, digest_size=16).digest())
            self._places.append(self._row)
            if len(self._digests) == _HELD:
                self._put_aside()
        self._row += 1

    def pairs(self) -> Pairs:
        """A line for each repeated row: its number and that of the first row of its key; ascending."""
        self._put_aside()
        found = [np.empty((0, 2), dtype=np.int64)]
        for path in self._paths:
            with contextlib.suppress(FileNotFoundError):
                found.append(_pairs(np.fromfile(path, dtype=np.uint64).reshape(-1, 3)))
                path.unlink()
        pairs = np.concatenate(found)
        ascending: Pairs = pairs[np.argsort(pairs[:, 0])]
        return ascending

    def _put_aside(self) -> None:
        if not self._digests:
            return
        hashes = np.frombuffer(b"".join(self._digests), dtype="<u8").reshape(-1, 2)
        records = np.column_stack([hashes, np.array(self._places, dtype=np.uint64)])
        bucket = (hashes[:, 0] >> _SHIFT).astype(np.int64)
        order = np.argsort(bucket, kind="stable")
        bounds = np.searchsorted(bucket[order], np.arange(len(self._paths) + 1))
        for number, path in enumerate(self._paths):
            if len(part := records[order[bounds[number] : bounds[number + 1]]]):
                with path.open("ab") as file:
                    part.tofile(file)
        self._digests, self._places = [], []


def _pairs(records: Words) -> Pairs:
    order = np.lexsort((records[:, 2], records[:, 1], records[:, 0]))
    records = records[order]
    same = np.zeros(len(records), dtype=bool)
    same[1:] = np.all(records[1:, :2] == records[:-1, :2], axis=1)
    group_start = np.maximum.accumulate(np.where(same, 0, np.arange(len(records))))
    places = records[:, 2].astype(np.int64)
    pairs: Pairs = np.column_stack([places[same], places[group_start[same]]])
    return pairs
