"""One optimiser step: micro-batches in, gradients added up and clipped; applied, or void if not finite.

The loss of a step is the mean over all tokens trained in it, on all processes: micro-batches and ranks with
few tokens weigh little, so how a batch is cut changes nothing but the order of sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from rollbook.train.model import TrainedModel
from rollbook.train.optimizer import Optimizer
from rollbook.train.packing import Batch
from rollbook.train.processes import Processes


class StepResult(NamedTuple):
    loss: float  # mean negative log-likelihood of the trained tokens of all processes
    grad_norm: float
    trained_tokens: int
    real_tokens: int
    allocated_tokens: int
    applied: bool  # False: the gradients were not finite, and the weights are as they were


class Engine:
    def __init__(
        self, model: TrainedModel, optimizer: Optimizer, processes: Processes, *, max_grad_norm: float
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.processes = processes
        self._max_grad_norm = max_grad_norm

    def step(self, batches: Sequence[Batch], learning_rate: float) -> StepResult:
        model, processes = self.model, self.processes
        model.model.train()
        trained = processes.sum(sum(len(batch.targets) for batch in batches))
        total = torch.zeros((), dtype=torch.float64, device=processes.device)
        for batch in batches:
            logprobs = model.logprobs(batch.to(processes.device))
            loss = -logprobs.sum() / trained
            torch.autograd.backward(loss)
            self.optimizer.collect()
            total += loss.detach().double()
        grad_norm = self.optimizer.clip(self._max_grad_norm)
        loss_value = processes.sum(float(total))
        applied = math.isfinite(grad_norm) and math.isfinite(loss_value)
        if applied:
            self.optimizer.step(learning_rate)
        else:
            self.optimizer.forget()
        return StepResult(
            loss=loss_value,
            grad_norm=grad_norm,
            trained_tokens=int(trained),
            real_tokens=int(processes.sum(sum(batch.real_tokens for batch in batches))),
            allocated_tokens=int(processes.sum(sum(batch.allocated_tokens for batch in batches))),
            applied=applied,
        )

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> float:
        """The mean loss over all trained tokens, without what was compiled for training."""
        self.model.model.eval()
        total, tokens = 0.0, 0
        with torch.compiler.set_stance("force_eager"):
            for batch in batches:
                total -= float(self.model.logprobs(batch.to(self.processes.device)).double().sum())
                tokens += len(batch.targets)
        everyone = self.processes.sum(tokens)
        return self.processes.sum(total) / everyone if everyone else float("nan")
