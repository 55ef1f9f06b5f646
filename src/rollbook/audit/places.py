"""Adds up where rollouts ended up, and how long and how good those of each place were."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from rollbook.audit.result import Place
from rollbook.records import numbers

Ints = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]

# Where a prompt is whose rollouts are in several places: in the first of these that one of them is in.
BEST_FIRST = (
    "trained", "surplus", "constant", "lone", "truncated", "dropped", "evaluated", "recorded", "collected",
    "failed", "unfinished", "superseded", "missing",
)  # fmt: skip
NUMBERS = {name: number for number, name in enumerate(BEST_FIRST)}


def numbered(groups: Ints) -> tuple[Ints, Ints]:
    """The different groups, and for each rollout the place of its group among them."""
    steps = np.diff(groups)
    if len(groups) and bool((steps >= 0).all()):  # as in any complete file; sorting takes longer
        begins = np.concatenate([[True], steps > 0])
        return groups[begins], np.cumsum(begins) - 1
    names, places = np.unique(groups, return_inverse=True)
    return names, places


class Moments:
    """Count, mean and variance of a stream of numbers."""

    def __init__(self) -> None:
        self.count, self._sum, self._squares = 0, 0.0, 0.0

    def add(self, values: Floats) -> None:
        """NaN is a value that nobody knows."""
        known = values[~np.isnan(values)]
        self.count += len(known)
        self._sum += float(known.sum())
        self._squares += float(np.square(known).sum())

    @property
    def mean(self) -> float | None:
        return self._sum / self.count if self.count else None

    @property
    def std_error(self) -> float | None:
        return numbers.std_error(math.sqrt(self.variance), self.count)

    @property
    def variance(self) -> float:
        if self.count < 2:
            return math.nan
        return max(0.0, (self._squares - self._sum * self._sum / self.count) / (self.count - 1))


class Rollouts(NamedTuple):
    """Some rollouts, one value for each."""

    groups: Ints
    places: Ints  # numbers of BEST_FIRST
    turns: Ints
    tokens: Floats  # sampled; NaN where nobody counted
    rewards: Floats


class _Sums:
    def __init__(self) -> None:
        self.prompts = self.rollouts = self.turns = self.tokens = 0
        self.lengths, self.rewards = Moments(), Moments()


class Places:
    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], _Sums] = {}

    def add(self, split: str, rollouts: Rollouts) -> None:
        """Rollouts of one iteration of a split, each in its place."""
        for number in np.flatnonzero(np.bincount(rollouts.places)).tolist():
            inside = rollouts.places == number
            sums = self._of(split, BEST_FIRST[number])
            tokens = rollouts.tokens[inside]
            sums.rollouts += int(inside.sum())
            sums.turns += int(rollouts.turns[inside].sum())
            sums.tokens += int(np.nansum(tokens))
            sums.lengths.add(tokens)
            sums.rewards.add(rollouts.rewards[inside])
        names, prompt = numbered(rollouts.groups)
        best = np.full(len(names), len(BEST_FIRST))
        np.minimum.at(best, prompt, rollouts.places)
        for number, count in enumerate(np.bincount(best, minlength=len(BEST_FIRST)).tolist()):
            if count:
                self._of(split, BEST_FIRST[number]).prompts += count

    def add_count(self, split: str, name: str, *, prompts: int, rollouts: int) -> None:
        """Rollouts of which nothing is known."""
        if rollouts:
            sums = self._of(split, name)
            sums.prompts += prompts
            sums.rollouts += rollouts

    def lengths(self, split: str, name: str) -> Moments:
        return self._of(split, name).lengths if (split, name) in self._sums else Moments()

    def rewards(self, split: str, name: str) -> Moments:
        return self._of(split, name).rewards if (split, name) in self._sums else Moments()

    def listed(self) -> list[Place]:
        return [
            Place(
                split=split,
                name=name,
                prompts=sums.prompts,
                rollouts=sums.rollouts,
                turns=sums.turns,
                tokens=sums.tokens,
                tokens_mean=sums.lengths.mean,
                reward_mean=sums.rewards.mean,
                reward_std_error=sums.rewards.std_error,
            )
            for (split, name), sums in sorted(
                self._sums.items(), key=lambda item: (item[0][0] != "train", item[0][0], NUMBERS[item[0][1]])
            )
        ]

    def _of(self, split: str, name: str) -> _Sums:
        return self._sums.setdefault((split, name), _Sums())
