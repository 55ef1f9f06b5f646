"""Texts that are nearly the same as one before: MinHash over runs of five words, found by LSH.

The similarity of two texts is the Jaccard index of their sets of five-word runs. MinHash estimates it from
128 values, give or take 0.035: well above the threshold a pair is found, well below it is not, and within
0.07 of it either may happen. Bands are chosen so that the index alone misses at most one pair in a hundred
at the threshold. About 2.5 KB are held for every text that stays, whatever its length.
"""

from __future__ import annotations

import re
from typing import Any

_PERMUTATIONS = 128
_RUN = 5
_SEED = 1
_BATCH = 256
_MISSED = 0.01
# Scripts without spaces: each character is a word.
_UNSPACED = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")


class NearDuplicates:
    def __init__(self, similarity: float) -> None:
        from rensa import RMinHash, RMinHashDeduplicator

        self._sketch: Any = RMinHash
        self._index: Any = RMinHashDeduplicator(
            threshold=similarity,
            num_perm=_PERMUTATIONS,
            use_lsh=True,
            num_bands=bands_for(similarity),
            seed=_SEED,
        )
        self.without_words = 0
        self._first: list[int] = []
        self._waiting: list[set[str]] = []

    def add(self, text: str) -> None:
        self._waiting.append(runs_of(text))
        if len(self._waiting) == _BATCH:
            self._settle()

    @property
    def first(self) -> list[int]:
        """The number of the first text like it, for every text; its own where it stays."""
        self._settle()
        return self._first

    def _settle(self) -> None:
        sketches = self._sketch.from_token_sets(self._waiting, _PERMUTATIONS, _SEED)
        for runs, sketch in zip(self._waiting, sketches, strict=True):
            number = len(self._first)
            original = number
            self.without_words += not runs  # like no other
            if runs and not self._index.add(str(number), sketch):
                original = min(map(int, self._index.get_duplicates(sketch)))
            self._first.append(original)
        self._waiting.clear()


def runs_of(text: str) -> set[str]:
    words = _WORD.findall(text.lower()) or text.split()
    if len(words) <= _RUN:
        return {" ".join(words)} if words else set()
    return {" ".join(words[start : start + _RUN]) for start in range(len(words) - _RUN + 1)}


def bands_for(similarity: float) -> int:
    """The fewest bands, hence the longest, that miss at most one pair in a hundred at this similarity."""
    bands = 1
    while bands < _PERMUTATIONS:
        if (1 - similarity ** (_PERMUTATIONS // bands)) ** bands <= _MISSED:
            return bands
        bands *= 2
    return bands
