"""One optimizer step: micro-batches in, gradients added up and clipped; applied, or void if not finite.

The loss of a step is the mean over the weight of all tokens trained in it, on all processes. That
denominator is fixed before the loss leaves any token out, so a clipped token takes away gradient and does
not make the others count more. How a step is cut into micro-batches and ranks changes nothing but the order
of sums.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rollbook.train.batch import COLUMNS, Batch, with_columns
from rollbook.train.losses import CrossEntropy, Loss, LossInputs, LossOutput, loss_of
from rollbook.train.metrics import Sums, Tally, token_metrics
from rollbook.train.model import Model
from rollbook.train.optimizer import Optimizer
from rollbook.train.processes import Processes
from rollbook.train.token_math import TokenOutputs

Seen = Callable[[Batch, TokenOutputs, LossOutput], None]


class StepOutput(NamedTuple):
    """What a step did; every number is that of all processes together."""

    loss: float  # the sum of the loss over the weight of all trained tokens
    grad_norm: float  # before clipping
    applied: bool  # False: something was not finite, or nothing was trained, and the weights are as they were
    trained_tokens: int
    real_tokens: int  # with prompts, without padding
    allocated_tokens: int  # with padding
    sums: Sums  # of what was measured token by token, see `metrics.py`

    @property
    def means(self) -> dict[str, float]:
        return self.sums.means()

    @property
    def is_left_out(self) -> bool:
        """Whether there was something to train and it was not finite."""
        return self.trained_tokens > 0 and not self.applied


class _Counts(NamedTuple):
    weight: float
    trained: float
    real: float
    allocated: float


def nothing(batch: Batch, outputs: TokenOutputs, loss: LossOutput) -> None:
    """The callback of whoever does not look."""


class Engine:
    def __init__(
        self,
        model: Model,
        optimizer: Optimizer,
        processes: Processes,
        *,
        dropout: bool = False,
        entropy: bool = True,
    ) -> None:
        """`dropout`: the model is in training mode; in RL it must not be, for it was not when it sampled."""
        self.model = model
        self.optimizer = optimizer
        self.processes = processes
        self._dropout, self._entropy = dropout, entropy

    def step(
        self, batches: Sequence[Batch], loss: Loss, learning_rate: float, *, seen: Seen = nothing
    ) -> StepOutput:
        """All processes call it; `seen` is given every batch as it is on the host, and the very tensors that
        made its loss."""
        return self.step_of_shares([batches], loss, learning_rate, seen=seen)

    def step_of_shares(
        self,
        shares: Sequence[Sequence[Batch]],
        loss: Loss,
        learning_rate: float,
        *,
        seen: Seen = nothing,
    ) -> StepOutput:
        """The same where this process computes for several, as a replay does. What each share gives is
        added up in their order, as if a process of its own had it."""
        self.model.use_dropout(self._dropout)
        counts, columns = self._count([batch for batches in shares for batch in batches])
        tally = Tally()
        for number, batches in enumerate(shares):
            before = self.optimizer.take_gradients() if number else None
            tally.add_all(self._share(batches, columns, loss, counts.weight, seen))
            if before is not None:
                self.optimizer.add_gradients(before)
        self.processes.sum_gradients(self.optimizer.weights)
        grad_norm = self.optimizer.clip()
        loss_sum, sums = tally.total(self.processes, counts.trained)
        applied = counts.weight > 0 and math.isfinite(grad_norm) and math.isfinite(loss_sum)
        if applied:
            self.optimizer.step(learning_rate)
        else:
            self.optimizer.zero_grad()
        return StepOutput(
            loss=loss_sum / counts.weight if counts.weight else math.nan,
            grad_norm=grad_norm,
            applied=applied,
            trained_tokens=int(counts.trained),
            real_tokens=int(counts.real),
            allocated_tokens=int(counts.allocated),
            sums=sums,
        )

    def _share(
        self, batches: Sequence[Batch], columns: Sequence[str], loss: Loss, weight: float, seen: Seen
    ) -> Tally:
        """Adds the gradients of one share to those that are there."""
        tally = Tally()
        for batch in batches:
            self._backward(with_columns(batch, columns), loss, weight, tally, seen)
        if not batches:
            self._add_nothing(loss, columns, tally)
        return tally

    def _backward(self, on_host: Batch, loss: Loss, weight: float, tally: Tally, seen: Seen) -> None:
        batch = on_host.to(self.processes.device)
        outputs, made = self.add_gradient(batch, loss, weight)
        tally.add(made.loss_sum, token_metrics(batch.columns_N, outputs, made))
        seen(on_host, outputs, made)

    def add_gradient(self, batch: Batch, loss: Loss, weight: float) -> tuple[TokenOutputs, LossOutput]:
        """Adds the gradient of a micro-batch to those that are there, as a part of a step of `weight`."""
        outputs = self.model.outputs(batch, entropy=self._entropy)
        made = loss_of(loss, LossInputs(outputs.logprob_N, batch.example_N, batch.columns_N))
        torch.autograd.backward(made.loss_sum / (weight or 1.0))
        self.optimizer.accumulate()
        return outputs, made

    def _add_nothing(self, loss: Loss, columns: Sequence[str], tally: Tally) -> None:
        """A process without data takes part in the same sums: the loss names its facts for no tokens."""
        none_N = torch.zeros(0, device=self.processes.device)
        columns_N: Mapping[str, Tensor] = defaultdict(lambda: none_N, dict.fromkeys(columns, none_N))
        made = loss_of(loss, LossInputs(none_N, none_N.long(), columns_N))
        outputs = TokenOutputs(none_N, none_N if self._entropy else None)
        tally.add(made.loss_sum, token_metrics(columns_N, outputs, made))

    def _count(self, batches: Sequence[Batch]) -> tuple[_Counts, list[str]]:
        """What all processes have together, in one sum; and the columns that any of them has."""
        own = _Counts(
            weight=sum(_weight(batch) for batch in batches),
            trained=sum(batch.trained_tokens for batch in batches),
            real=sum(batch.real_tokens for batch in batches),
            allocated=sum(batch.allocated_tokens for batch in batches),
        )
        has = [float(any(name in batch.columns_N for batch in batches)) for name in COLUMNS]
        given = torch.tensor([*own, *has], dtype=torch.float64, device=self.processes.device)
        numbers = self.processes.sum_all(given).tolist()
        found = [name for name, count in zip(COLUMNS, numbers[len(own) :], strict=True) if count]
        return _Counts(*numbers[: len(own)]), found

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> float:
        """The mean negative log-likelihood of all trained tokens, without what was compiled for training."""
        self.model.use_dropout(False)
        total = weight = 0.0
        with torch.compiler.set_stance("force_eager"):
            for batch in batches:
                batch = batch.to(self.processes.device)
                outputs = self.model.outputs(batch)
                given = LossInputs(outputs.logprob_N, batch.example_N, batch.columns_N)
                total += float(CrossEntropy()(given).loss_sum)
                weight += _weight(batch)
        sums = torch.tensor([total, weight], dtype=torch.float64, device=self.processes.device)
        total, weight = self.processes.sum_all(sums).tolist()
        return total / weight if weight else math.nan


def _weight(batch: Batch) -> float:
    """The share of a batch in the denominator of the loss."""
    weight_N = batch.columns_N.get("weight")
    return float(batch.trained_tokens) if weight_N is None else float(weight_N.double().sum())
