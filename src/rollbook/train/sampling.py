"""Which samples a step sees: shuffled anew in every epoch, packed, and the same for the same seed.

The order of an epoch is a function of the seed and the epoch's number alone, so resuming needs no state but
the number of the step: the batches of a killed and resumed run are those of one that was not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rollbook.train.batch import best_fit

Bins = list[list[int]]


def epoch_order(
    sizes: Sequence[int], weights: Sequence[float], *, seed: int, epoch: int
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Numbers of samples in the order of an epoch; datasets stand one after another in the numbering.

    A weight of 2 goes twice through a dataset, one of 0.5 through a random half of it, another half in
    each epoch.
    """
    chance = np.random.default_rng([seed, epoch])
    chosen = []
    first = 0
    for size, weight in zip(sizes, weights, strict=True):
        whole, part = int(weight), round((weight - int(weight)) * size)
        numbers = [np.arange(first, first + size)] * whole
        if part:
            numbers.append(first + chance.choice(size, part, replace=False))
        chosen += numbers
        first += size
    order = np.concatenate(chosen) if chosen else np.empty(0, np.int64)
    return chance.permutation(order)


def rows_of_epoch(
    order: np.ndarray[Any, np.dtype[np.int64]],
    lengths: np.ndarray[Any, np.dtype[np.int64]],
    *,
    capacity: int,
    packed: bool,
    seed: int,
    epoch: int,
) -> Bins:
    """The rows of an epoch: packed bins in random order, or one sample each."""
    if not packed:
        return [[int(number)] for number in order]
    bins = [[int(order[place]) for place in some] for some in best_fit(lengths[order], capacity)]
    chance = np.random.default_rng([seed, epoch, 1])
    return [bins[place] for place in chance.permutation(len(bins))]
