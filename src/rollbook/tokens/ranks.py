"""Whether one process of the trainer disagrees with the sampler more than the others.

A process with stale weights, another kernel or a broken device shows in its mean mismatch KL long before it
shows in the mean of all. The tokens of a sequence go together, so means are of sequences.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from rollbook.tokens.chunks import Chunk

FACTOR, ERRORS = 2.0, 4.0  # an outlier is off by both: this many times, and so many standard errors


class RankRow(msgspec.Struct, kw_only=True):
    rank: int
    sequences: int
    tokens: int
    mismatch_kl: float  # mean over its sequences
    typical: float  # the same of the process in the middle
    errors: float  # how many standard errors lie between the two
    is_outlier: bool


class _Moments(msgspec.Struct):
    sequences: int = 0
    tokens: int = 0
    total: float = 0.0
    squared: float = 0.0

    @property
    def mean(self) -> float:
        return self.total / self.sequences

    @property
    def error(self) -> float:
        """The squared standard error of the mean; infinite where one sequence is all there is."""
        if self.sequences < 2:
            return math.inf
        spread = max(0.0, self.squared / self.sequences - self.mean**2)
        return spread / (self.sequences - 1)


class RankComparison:
    def __init__(self) -> None:
        self._moments: dict[int, _Moments] = {}

    def add(self, chunk: Chunk) -> None:
        kl_N = chunk.floats("mismatch_kl").astype(np.float64)
        is_finite_N = np.isfinite(kl_N)
        size = len(chunk.sequences)
        tokens_S = np.bincount(chunk.sequence_N, is_finite_N, size)
        total_S = np.bincount(chunk.sequence_N, np.where(is_finite_N, kl_N, 0.0), size)
        for sequence, tokens, total in zip(chunk.sequences, tokens_S, total_S, strict=True):
            if sequence.rank is not None and tokens:
                moments = self._moments.setdefault(sequence.rank, _Moments())
                mean = float(total / tokens)
                moments.sequences += 1
                moments.tokens += int(tokens)
                moments.total += mean
                moments.squared += mean * mean

    def rows(self) -> list[RankRow]:
        """The processes, if there are several."""
        if len(self._moments) < 2:
            return []
        by_mean = sorted(self._moments.values(), key=lambda own: own.mean)
        typical = by_mean[(len(by_mean) - 1) // 2]
        return [_row(rank, own, typical) for rank, own in sorted(self._moments.items())]


def _row(rank: int, own: _Moments, typical: _Moments) -> RankRow:
    gap, error = abs(own.mean - typical.mean), math.sqrt(own.error + typical.error)
    errors = gap / error if error else math.inf if gap else 0.0
    smaller, larger = sorted((own.mean, typical.mean))
    return RankRow(
        rank=rank,
        sequences=own.sequences,
        tokens=own.tokens,
        mismatch_kl=own.mean,
        typical=typical.mean,
        errors=errors,
        is_outlier=larger > FACTOR * smaller and errors > ERRORS,
    )
