"""Which task each group of an iteration gets: a pure function of the seed and the iteration.

There is no loader and no state: iteration 40 of a resumed run, of a rerun and of a replay draws the same
tasks. Environments are drawn by weight; the tasks of an environment come in a random order, another one for
each pass through them, and none comes twice before all came once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rollbook.records.identity import derive_seed

Counts = np.ndarray[Any, np.dtype[np.int64]]


def groups_drawn(groups_per_batch: int, oversample: float) -> int:
    """How many groups an iteration samples, so that enough of them are not constant."""
    return math.ceil(groups_per_batch * oversample)


def is_evaluated(every: int, i: int, iterations: int) -> bool:
    """Whether an evaluation is due before iteration i; `iterations` stands for the end of the run."""
    return i in (0, iterations) or (every > 0 and i % every == 0)


class Draw(NamedTuple):
    """One group: which environment it is of, and which of its tasks."""

    environment: int
    task: int


class Schedule:
    def __init__(self, seed: int, weights: Sequence[float], sizes: Sequence[int], groups: int) -> None:
        """`sizes` are the numbers of tasks of the environments; `groups` are drawn per iteration."""
        self._seed, self._groups = seed, groups
        self._sizes = list(sizes)
        total = sum(weights)
        self._shares = [weight / total for weight in weights]
        # How often each environment was drawn before an iteration, for the iterations asked about so far.
        self._before: list[Counts] = [np.zeros(len(sizes), np.int64)]
        self._orders: dict[
            int, tuple[int, Counts]
        ] = {}  # the epoch that each environment is in, and its order

    def draws(self, iteration: int) -> list[Draw]:
        chosen = self._environments(iteration)
        drawn = self._drawn_before(iteration).copy()
        draws = []
        for environment in chosen.tolist():
            draws.append(Draw(environment, self._task(environment, int(drawn[environment]))))
            drawn[environment] += 1
        return draws

    def _environments(self, iteration: int) -> Counts:
        if len(self._shares) == 1:
            return np.zeros(self._groups, np.int64)
        generator = np.random.default_rng(derive_seed("environments", self._seed, iteration))
        return generator.choice(len(self._shares), size=self._groups, p=self._shares)

    def _drawn_before(self, iteration: int) -> Counts:
        while len(self._before) <= iteration:
            last = self._environments(len(self._before) - 1)
            counts = np.bincount(last, minlength=len(self._sizes))
            self._before.append(self._before[-1] + counts)
        return self._before[iteration]

    def _task(self, environment: int, number: int) -> int:
        epoch, place = divmod(number, self._sizes[environment])
        return int(self._order(environment, epoch)[place])

    def _order(self, environment: int, epoch: int) -> Counts:
        if environment not in self._orders or self._orders[environment][0] != epoch:
            generator = np.random.default_rng(derive_seed("tasks", self._seed, environment, epoch))
            self._orders[environment] = epoch, generator.permutation(self._sizes[environment])
        return self._orders[environment][1]
