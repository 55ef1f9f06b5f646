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
_GRADIENT_ROWS = 4  # a gradient takes its time, and rounding is the same in all of them


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
    one_N, other_N = (_logprobs(trainer, batches) for batches in _two_shapes(trainer, some))
    d_N = one_N - other_N
    ratio_N, largest = d_N.exp(), float(d_N.abs().max())
    metrics = {
        "noise_floor/k3": float((torch.expm1(-d_N) + d_N).mean()),
        "noise_floor/max": largest,
        "noise_floor/outside": float(((ratio_N < 0.9) | (ratio_N > 1.1)).double().mean()),
    }
    # Two ways may agree by chance; nothing is more exact than the last digit of what it is computed in.
    last_digit = torch.finfo(trainer.model.head_dtype).eps
    noise = Noise(
        logprob=max(largest, last_digit * float(one_N.abs().max())),
        gradient=max(_of_gradient(trainer, loss, some[:_GRADIENT_ROWS]), last_digit),
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


def _two_shapes(trainer: Trainer, examples: list[Example]) -> tuple[list[Batch], list[Batch]]:
    """All of them in one batch, and each in one of its own, in the same order."""
    model, most_tokens, device = trainer.model, trainer.micro_batch_tokens, trainer.processes.device
    (together,) = model.batches(examples, most_tokens)
    by_key = {example.key: example for example in examples}
    apart = [model.batches([by_key[key]], most_tokens)[0] for key in together.keys]
    return [together.to(device)], [batch.to(device) for batch in apart]


@torch.no_grad()
def _logprobs(trainer: Trainer, batches: Sequence[Batch]) -> Tensor:
    return torch.cat([trainer.model.outputs(batch).logprob_N for batch in batches]).double()


def _of_gradient(trainer: Trainer, loss: Loss, examples: list[Example]) -> float:
    """The norm of the difference of two gradients, as a part of the gradient's."""
    together, apart = _two_shapes(trainer, examples)
    weight = float(together[0].trained_tokens)
    try:
        for batch in together:
            trainer.engine.add_gradient(batch, loss, weight)
        whole = float(trainer.optimizer.gradient_norm())
        for batch in apart:  # with the sign turned: what is left is the difference
            trainer.engine.add_gradient(batch, loss, -weight)
        left = float(trainer.optimizer.gradient_norm())
    finally:
        trainer.optimizer.zero_grad()
    return left / whole if whole else 0.0
