"""The gradient of a whole step, for each loss, against finite differences in float64.

The reference shares no code with the engine: the library's own forward pass, a plain softmax at the
temperature of each token, the formula of the loss as papers write it, one division.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.core import core_engine, core_model, sampled_examples, step_gradients
from rollbook.train.batch import Example, pack
from rollbook.train.losses import CrossEntropy, Dppo, ImportanceSampling, Ipo, Loss, PpoClip, ReferenceKl

EPS = 3e-4  # norms of the library are float32 whatever the model is, which makes smaller steps noisy


class Reference:
    """The loss of a step as a function of the weights, in float64."""

    def __init__(self, model: Any, loss: Loss, examples: list[Example]) -> None:
        self.model = copy.deepcopy(model).double()
        self.model.set_attn_implementation("eager")
        self._loss, self._examples = loss, examples
        self._at_start = [self._logprobs(example) for example in examples]

    @torch.no_grad()
    def __call__(self) -> float:
        total = weights = 0.0
        for example, start_N in zip(self._examples, self._at_start, strict=True):
            weight_N = column(example, "weight")
            total += float((weight_N * self._formula(example, self._logprobs(example), start_N)).sum())
            weights += float(weight_N.sum())
        return total / weights

    @torch.no_grad()
    def _logprobs(self, example: Example) -> Tensor:
        token_1T = torch.from_numpy(example.token_T.astype(np.int64))[None]
        logits_TV = self.model(input_ids=token_1T, use_cache=False).logits[0, :-1]
        spread_TV = (logits_TV / torch.from_numpy(example.columns_T["temperature"][1:, None])).log_softmax(-1)
        logprob_T = spread_TV.gather(1, token_1T[0, 1:, None])[:, 0]
        return logprob_T[torch.from_numpy(example.trained_T[1:])]

    def _formula(self, example: Example, logprob_N: Tensor, start_N: Tensor) -> Tensor:
        """What a mask or a held advantage depends on is taken at the start: no gradient goes through it."""
        mu_N, advantage_N = column(example, "sampled_logprob"), column(example, "advantage")
        log_N = logprob_N - mu_N
        ratio_N, moved_N = log_N.exp(), start_N.exp() - mu_N.exp()
        match self._loss:
            case CrossEntropy():
                return -logprob_N
            case ImportanceSampling():
                return -advantage_N * ratio_N
            case PpoClip(clip_low=low, clip_high=high):
                return -torch.minimum(advantage_N * ratio_N, advantage_N * ratio_N.clamp(1 - low, 1 + high))
            case Dppo(mask_low=low, mask_high=high, kl_tau=tau):
                kept_N = torch.where(advantage_N > 0, moved_N <= high, moved_N >= -low)
                return kept_N * -advantage_N * ratio_N + tau * log_N**2
            case Ipo(threshold=most, kl_tau=tau):
                return (moved_N.abs() <= most) * -advantage_N * ratio_N + tau * log_N**2
            case ReferenceKl():
                held_N = column(example, "reference_logprob") - start_N
                return (moved_N >= -0.2) * -held_N * ratio_N + 1e-3 * log_N**2
        raise AssertionError(self._loss)


def column(example: Example, name: str) -> Tensor:
    return torch.from_numpy(example.columns_T[name][1:][example.trained_T[1:]]).double()


def with_weights(example: Example, chance: np.random.Generator) -> Example:
    weight_T = chance.choice([0.0, 0.5, 1.0, 2.0], len(example)).astype(np.float32)
    weight_T[-1] = 1.0
    return Example(example.token_T, example.trained_T, {**example.columns_T, "weight": weight_T}, example.key)


LOSSES = [
    CrossEntropy(),
    ImportanceSampling(),
    PpoClip(clip_low=0.1, clip_high=0.3),
    Dppo(mask_low=0.002, mask_high=0.003, kl_tau=0.3),
    Ipo(threshold=0.006, kl_tau=0.3),
    ReferenceKl(),
]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: str(type(loss).__struct_config__.tag))
def test_a_step_goes_down_the_slope_of_its_loss(loss: Loss) -> None:
    """Along random directions; examples in several micro-batches, with temperatures and weights."""
    engine = core_engine(core_model(initializer_range=0.1))
    chance = np.random.default_rng(5)
    examples = [with_weights(example, chance) for example in sampled_examples([9, 17, 4, 30, 12], seed=2)]
    made, gradients = step_gradients(engine, pack(examples, 32), loss)
    reference = Reference(engine.model.model, loss, examples)
    assert made.loss == pytest.approx(reference(), rel=1e-5, abs=1e-6)
    if "kept" in made.means and not isinstance(loss, ImportanceSampling | ReferenceKl):
        assert 0.2 < made.means["kept"] < 0.98  # a bound was at work, and not everywhere
    weights = dict(reference.model.named_parameters())
    draws = torch.Generator().manual_seed(1)
    for _ in range(3):
        direction = {
            name: torch.randn(weight.shape, generator=draws, dtype=torch.float64)
            for name, weight in weights.items()
        }
        slope = sum(float((gradients[name].double() * direction[name]).sum()) for name in weights)
        ends = []
        for sign in (1, -1):
            move(weights, direction, sign * EPS)
            ends.append(reference())
            move(weights, direction, -sign * EPS)
        assert slope == pytest.approx((ends[0] - ends[1]) / (2 * EPS), rel=2e-3, abs=1e-4)


@torch.no_grad()
def move(weights: dict[str, Any], direction: dict[str, Tensor], by: float) -> None:
    for name, weight in weights.items():
        weight += by * direction[name]
