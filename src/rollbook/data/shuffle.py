"""Chance that is the same everywhere: each row's number decides, with the seed, and nothing else.

Every row of a source has a random 64-bit number, made from the seed, the source's name and the row's place.
A sample of k rows is the k rows with the smallest numbers, so every set of k rows is equally likely; a
shuffle is a sort by other such numbers. Nothing depends on memory, blocks, threads or the version of a
library, so the same seed gives the same bytes, and no more than a block of numbers is ever held.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np

Words = np.ndarray[Any, np.dtype[np.uint64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]

BLOCK = 1 << 16
_HISTOGRAM_BITS = 16
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)
_LAST_SHIFT = np.uint64(31)


def stream(seed: int, *names: str) -> int:
    """Where the numbers of one purpose begin; different names are unrelated."""
    text = "\0".join((str(seed), *names)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def numbers_of(start: int, rows: Words) -> Words:
    """The random numbers of these rows in a stream (the SplitMix64 generator, at any place)."""
    value = (rows + np.uint64(1)) * _STEP + np.uint64(start)
    for shift, factor in _MIX:
        value = (value ^ (value >> shift)) * factor
    mixed: Words = value ^ (value >> _LAST_SHIFT)
    return mixed


def row_blocks(count: int) -> Iterator[Words]:
    for first in range(0, count, BLOCK):
        yield np.arange(first, min(count, first + BLOCK), dtype=np.uint64)


def number_below(start: int, available: int, wanted: int) -> int:
    """The bound below which exactly `wanted` of the rows' numbers lie.

    Two rows of one stream never have the same number (the mixing can be undone), so the bound exists.
    """
    if wanted >= available:
        return 1 << 64
    low, bits, below = 0, 64, 0
    while True:
        bits -= _HISTOGRAM_BITS
        counts = np.zeros(1 << _HISTOGRAM_BITS, dtype=np.int64)
        size = 1 << (bits + _HISTOGRAM_BITS)
        for rows in row_blocks(available):
            found = numbers_of(start, rows)
            found = found[_within(found, low, low + size)]
            places = ((found - np.uint64(low)) >> np.uint64(bits)).astype(np.int64)
            counts += np.bincount(places, minlength=len(counts))
        upto = np.cumsum(counts) + below
        place = int(np.searchsorted(upto, wanted, side="left"))
        if upto[place] == wanted:
            return low + ((place + 1) << bits)
        below = int(upto[place] - counts[place])
        low += place << bits


def chosen_blocks(start: int, available: int, wanted: int) -> Iterator[Words]:
    """The rows of a uniform sample without replacement, in ascending order, a block at a time."""
    bound = number_below(start, available, wanted) if wanted else 0
    for rows in row_blocks(available if wanted else 0):
        yield rows[_within(numbers_of(start, rows), 0, bound)]


def _within(found: Words, low: int, high: int) -> Flags:
    """Which numbers lie in [low, high); `high` may be 2**64, which no number of numpy's can be."""
    if high <= low:
        return np.zeros(len(found), dtype=bool)
    flags: Flags = (found >= np.uint64(low)) & (found <= np.uint64(high - 1))
    return flags
