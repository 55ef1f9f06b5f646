"""Which samples a step sees: shuffled anew in every epoch, packed into rows, and the same for the same seed.

Everything follows from the settings and the number of the step, so resuming needs no state: the batches of a
killed and resumed run are those of one that was not. A row is what `per_device_train_batch_size` counts: a
bin of up to `max_length` tokens when samples are packed, else one sample.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rollbook.errors import UsageError
from rollbook.sft.settings import SftSettings
from rollbook.sft.token_store import Corpus
from rollbook.train.batch import Batch, Example, Shape, best_fit, idle, packed_batch, padded_batch
from rollbook.train.machine import choose_micro_batch_tokens
from rollbook.train.model import Model
from rollbook.train.processes import Processes

Rows = list[list[int]]  # the numbers of the samples in each row
Ints = np.ndarray[Any, np.dtype[np.int64]]


class Epochs:
    """The rows of every step of a run, for all processes together."""

    def __init__(self, settings: SftSettings, corpus: Corpus, *, packed: bool) -> None:
        training = settings.training
        self._weights = [dataset.weight for dataset in settings.data.train]
        self._sizes, self._lengths = corpus.sizes, corpus.lengths
        self._seed, self._capacity, self._packed = training.seed, settings.data.max_length, packed
        self._known: tuple[int, Rows] = (-1, [])
        self._steps: list[int] = []  # of each epoch
        self.rows_per_micro_batch = training.per_device_train_batch_size * settings.processes
        self.rows_per_step = self.rows_per_micro_batch * training.gradient_accumulation_steps
        self.rows_per_epoch = len(self.rows(0))
        self.samples_per_epoch = sum(len(row) for row in self.rows(0))
        if not self.rows_per_epoch:
            raise UsageError("data.train: the weights leave no row to learn from; make one of them larger")

    def steps_for(self, epochs: float) -> int:
        """How many steps that many epochs take; at least one."""
        whole = int(epochs)
        steps = sum(self._steps_of(epoch) for epoch in range(whole))
        return max(1, steps + math.ceil((epochs - whole) * self._steps_of(whole)))

    def epochs_after(self, step: int) -> float:
        """How many epochs are done after a step."""
        epoch, place = self._place_of(step)
        return epoch + (place + 1) / self._steps_of(epoch)

    def micro_batches(self, step: int) -> list[Rows]:
        """The rows of each micro-batch of a step, counted from 1."""
        epoch, place = self._place_of(step)
        rows = self.rows(epoch)[place * self.rows_per_step : (place + 1) * self.rows_per_step]
        return in_groups(rows, self.rows_per_micro_batch)

    def rows(self, epoch: int) -> Rows:
        """All rows of an epoch, in order."""
        if self._known[0] != epoch:
            order = epoch_order(self._sizes, self._weights, seed=self._seed, epoch=epoch)
            rows = to_rows(order, self._lengths, capacity=self._capacity, packed=self._packed)
            if self._packed:
                chance = np.random.default_rng([self._seed, epoch, 1])
                rows = [rows[place] for place in chance.permutation(len(rows))]
            self._known = (epoch, rows)
        return self._known[1]

    def _place_of(self, step: int) -> tuple[int, int]:
        """The epoch of a step, and its number there; both from 0."""
        epoch, place = 0, step - 1
        while place >= self._steps_of(epoch):
            place -= self._steps_of(epoch)
            epoch += 1
        return epoch, place

    def _steps_of(self, epoch: int) -> int:
        """Part of a dataset is another part in each epoch, which may pack into more or fewer rows."""
        varies = any(weight != int(weight) for weight in self._weights)
        while len(self._steps) <= epoch:
            rows = len(self.rows(len(self._steps))) if varies else self.rows_per_epoch
            # The last step may be smaller than the others; nothing is left out.
            self._steps.append(math.ceil(rows / self.rows_per_step))
        return self._steps[epoch]


class Batches:
    """Rows as batches of this process; with `shape` all of one size, for compiled kernels."""

    def __init__(
        self, corpus: Corpus, model: Model, processes: Processes, shape: Shape | None = None
    ) -> None:
        self._corpus, self._model, self._processes, self._shape = corpus, model, processes, shape

    def of(self, micro_batches: Sequence[Rows]) -> Iterator[Batch]:
        """Every process makes as many, for they wait for each other in each."""
        rank, count = self._processes.rank, self._processes.count
        for rows in micro_batches:
            mine = rows[rank::count]
            if mine:
                yield from map(self._made, self._cut(mine))
            else:
                yield idle(self._made(rows[:1]))

    def _cut(self, rows: Rows) -> list[Rows]:
        """Rows that go through the model at once: all of them, but on one CPU as many as fit its cache."""
        if self._processes.are_several or self._processes.device.type != "cpu":
            return [rows]
        most = choose_micro_batch_tokens(self._processes.device)
        parts: list[Rows] = []
        room = 0
        for row in rows:
            tokens = sum(int(self._corpus.lengths[number]) for number in row)
            if not parts or tokens > room:
                parts.append([])
                room = most
            parts[-1].append(row)
            room -= tokens
        return parts

    def _made(self, rows: Rows) -> Batch:
        samples: list[Example] = [self._corpus[number] for row in rows for number in row]
        pad_token = self._model.pad_token
        if self._model.packs:
            return packed_batch(samples, shape=self._shape, pad_token=pad_token)
        return padded_batch(samples, pad_token=pad_token)


def rows_in_order(corpus: Corpus, *, capacity: int, packed: bool) -> Rows:
    """Every sample once, for an evaluation; those of similar length together, so little is padding."""
    by_length = np.argsort(corpus.lengths, kind="stable")
    return to_rows(by_length, corpus.lengths, capacity=capacity, packed=packed)


def epoch_order(sizes: Sequence[int], weights: Sequence[float], *, seed: int, epoch: int) -> Ints:
    """Numbers of samples in the order of an epoch; datasets stand one after another in the numbering.

    A weight of 2 goes twice through a dataset, one of 0.5 through a random half of it, another half in
    each epoch.
    """
    chance = np.random.default_rng([seed, epoch])
    chosen = []
    first = 0
    for size, weight in zip(sizes, weights, strict=True):
        whole, part = int(weight), round((weight - int(weight)) * size)
        chosen += [np.arange(first, first + size)] * whole
        if part:
            chosen.append(first + chance.choice(size, part, replace=False))
        first += size
    return chance.permutation(np.concatenate(chosen) if chosen else np.empty(0, np.int64))


def to_rows(order: Ints, lengths: Ints, *, capacity: int, packed: bool) -> Rows:
    """Samples packed into rows, the fullest fit first, or one in each."""
    if not packed:
        return [[int(number)] for number in order]
    return [[int(order[place]) for place in some] for some in best_fit(lengths[order], capacity)]


def in_groups(rows: Rows, size: int) -> list[Rows]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]
