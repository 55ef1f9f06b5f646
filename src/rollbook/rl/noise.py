"""How far the trainer is from itself: the same tokens once more, in batches of another shape.

Nothing but the order of sums makes a difference. It tells precision from a fault in the metrics, and a replay
on another machine what it may differ by.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rollbook.records.iterations import Noise
from rollbook.rl.opening import Trainer
from rollbook.train.batch import Batch, Example
from rollbook.train.losses import Loss

NOISE_FLOOR_EVERY = 10  # iterations


class Measured(NamedTuple):
    metrics: dict[str, float]
    noise: Noise | None


NOTHING = Measured({}, None)


def measure_noise(trainer: Trainer, loss: Loss, examples: Sequence[Example]) -> Measured:
    """On one micro-batch; the weights and their gradients stay what they were."""
    some = _of_one_batch(examples, trainer.micro_batch_tokens)
    if len(some) < 2:
        return NOTHING
    trainer.model.use_dropout(False)
    (together,) = trainer.model.batches(some, trainer.micro_batch_tokens)
    by_key = {example.key: example for example in some}
    apart = [trainer.model.batches([by_key[key]], trainer.micro_batch_tokens)[0] for key in together.keys]
    try:
        one_N = _backward(trainer, loss, [together], together.trained_tokens)
        whole = float(trainer.optimizer.gradient_norm())
        # With the sign turned: what is left is the difference, and no second gradient is held.
        other_N = _backward(trainer, loss, apart, -together.trained_tokens)
        left = float(trainer.optimizer.gradient_norm())
    finally:
        trainer.optimizer.zero_grad()
    d_N = one_N - other_N
    largest = float(d_N.abs().max())
    ratio_N = d_N.exp()
    metrics = {
        "noise_floor/k3": float((torch.expm1(-d_N) + d_N).mean()),
        "noise_floor/max": largest,
        "noise_floor/outside": float(((ratio_N < 0.9) | (ratio_N > 1.1)).double().mean()),
    }
    # Two ways may agree by chance; nothing is more exact than the last digit of what it is computed in.
    last_digit = torch.finfo(trainer.model.head_dtype).eps
    noise = Noise(
        logprob=max(largest, last_digit * float(one_N.abs().max())),
        gradient=max(left / whole if whole else 0.0, last_digit),
    )
    is_finite = math.isfinite(noise.logprob) and math.isfinite(noise.gradient)
    return Measured(metrics, noise if is_finite else None)


def _of_one_batch(examples: Sequence[Example], most_tokens: int) -> list[Example]:
    some: list[Example] = []
    for example in examples:
        if sum(map(len, some)) + len(example) > most_tokens:
            break
        some.append(example)
    return some


def _backward(trainer: Trainer, loss: Loss, batches: Sequence[Batch], weight: float) -> Tensor:
    """Adds their gradients to those that are there; returns the log-probabilities."""
    found = []
    for batch in batches:
        outputs, _ = trainer.engine.add_gradient(batch.to(trainer.processes.device), loss, weight)
        found.append(outputs.logprob_N.detach().double())
    return torch.cat(found)
