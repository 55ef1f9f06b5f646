"""The data of a run as micro-batches: which samples a step sees, for each process, packed or padded.

Everything follows from the settings and the number of the step, so there is nothing to save or restore.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

from rollbook.errors import UsageError
from rollbook.policies.chat_format import ChatFormat
from rollbook.train.batch import Batch, Example, Shape, idle, packed_batch, padded_batch
from rollbook.train.model import Model
from rollbook.train.processes import Processes
from rollbook.train.sampling import Bins, epoch_order, rows_of_epoch
from rollbook.train.settings import DatasetSettings, SftSettings
from rollbook.train.token_store import Corpus, TokenReport, tokenised


class Feed:
    def __init__(
        self,
        settings: SftSettings,
        model: Model,
        corpus: Corpus,
        processes: Processes,
        *,
        full_width: bool,
    ) -> None:
        """`full_width` fills every packed batch up to one size, for compiled kernels."""
        self._data, self._training = settings.data, settings.training
        self._model, self._corpus, self._processes = model, corpus, processes
        self._full_width = full_width
        self._epoch: tuple[int, Bins] = (-1, [])
        self._steps_by_epoch: list[int] = []
        # What all processes take at once.
        self.rows_together = self._training.per_device_train_batch_size * processes.count
        self.rows_a_step = self.rows_together * self._training.gradient_accumulation_steps
        self.rows_in_epoch = len(self._rows(0))
        self.samples_in_epoch = sum(len(row) for row in self._rows(0))
        if not self.rows_in_epoch:
            raise UsageError("data.train: the weights leave no row to learn from; make one of them larger")

    def steps_in(self, epochs: float) -> int:
        """How many steps that many epochs take; at least one."""
        whole = int(epochs)
        steps = sum(self._steps_of(epoch) for epoch in range(whole))
        return max(1, steps + math.ceil((epochs - whole) * self._steps_of(whole)))

    def epoch_at(self, step: int) -> float:
        """How many epochs are done after a step."""
        epoch, place = self._place_of(step)
        return epoch + (place + 1) / self._steps_of(epoch)

    def batches(self, step: int) -> Iterator[Batch]:
        """The micro-batches of a step, counted from 1, for this process."""
        epoch, place = self._place_of(step)
        rows = self._rows(epoch)[place * self.rows_a_step : (place + 1) * self.rows_a_step]
        # Every process makes as many batches, for they wait for each other in each.
        for start in range(0, len(rows), self.rows_together):
            mine = rows[start + self._processes.rank : start + self.rows_together : self._processes.count]
            yield self._batch(mine) if mine else idle(self._batch(rows[:1]))

    def eval_batches(self, corpus: Corpus) -> Iterator[Batch]:
        for start in range(0, len(corpus), self.rows_together):
            end = min(start + self.rows_together, len(corpus))
            mine = [
                corpus[number] for number in range(start + self._processes.rank, end, self._processes.count)
            ]
            yield self._made(mine) if mine else idle(self._made([corpus[start]]))

    def _place_of(self, step: int) -> tuple[int, int]:
        """The epoch of a step, and its number there; both from 0."""
        epoch, place = 0, step - 1
        while place >= self._steps_of(epoch):
            place -= self._steps_of(epoch)
            epoch += 1
        return epoch, place

    def _steps_of(self, epoch: int) -> int:
        """Part of a dataset is another part in each epoch, which may pack into more or fewer rows."""
        known = self._steps_by_epoch
        varies = any(dataset.weight != int(dataset.weight) for dataset in self._data.train)
        while len(known) <= epoch:
            rows = len(self._rows(len(known))) if varies else self.rows_in_epoch
            # The last step may be smaller than the others; nothing is left out.
            known.append(math.ceil(rows / self.rows_a_step))
        return known[epoch]

    def _rows(self, epoch: int) -> Bins:
        if self._epoch[0] != epoch:
            seed = self._training.seed
            weights = [dataset.weight for dataset in self._data.train]
            order = epoch_order(self._corpus.sizes, weights, seed=seed, epoch=epoch)
            rows = rows_of_epoch(
                order,
                self._corpus.lengths,
                capacity=self._data.max_length,
                packed=self._model.packs,
                seed=seed,
                epoch=epoch,
            )
            self._epoch = (epoch, rows)
        return self._epoch[1]

    def _batch(self, rows: Bins) -> Batch:
        return self._made([self._corpus[number] for row in rows for number in row])

    def _made(self, samples: list[Example]) -> Batch:
        if not self._model.packs:
            return padded_batch(samples, pad_token=self._model.pad_token)
        longest = self._data.max_length
        shape = Shape(longest * self._training.per_device_train_batch_size, longest)
        return packed_batch(
            samples, shape=shape if self._full_width else None, pad_token=self._model.pad_token
        )


def make_corpus(
    datasets: list[DatasetSettings],
    settings: SftSettings,
    chat: ChatFormat,
    cache: Path,
    processes: Processes,
    say: Callable[[str], None],
) -> Corpus:
    stores = []
    for dataset in datasets:
        if processes.is_first:  # the others find it made
            tokenised(dataset, chat, settings.data, cache, on_wait=say)
        processes.wait_for_all()
        stores.append(tokenised(dataset, chat, settings.data, cache))
    corpus = Corpus(stores)
    if not len(corpus):
        counts = "; ".join(
            f"{dataset.path}: {told(store.report)}" for dataset, store in zip(datasets, stores, strict=True)
        )
        raise UsageError(f"nothing to learn from is left. {counts}")
    return corpus


def told(report: TokenReport) -> str:
    """What became of the rows, in words; nothing that was left out stays unsaid."""
    kept = (
        f"{report.samples} of {report.rows} rows, {report.tokens:,} tokens, {report.trained_tokens:,} trained"
    )
    losses = {
        "dropped, too long": report.dropped_too_long,
        "truncated": report.truncated,
        "tokens cut off": report.truncated_tokens,
        "dropped, nothing to learn": report.dropped_untrained,
        "parts of messages that the template leaves out": report.parts_not_rendered,
    }
    return "; ".join([kept, *(f"{name}: {count}" for name, count in losses.items() if count)])
