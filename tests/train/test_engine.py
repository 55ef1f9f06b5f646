"""A step: the mean over all trained tokens however it is cut, void when not finite, exact in its copies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rollbook.train.batch import Batch, Example, packed_batch
from rollbook.train.engine import Engine, StepOutput
from rollbook.train.losses import CrossEntropy, Loss, LossInputs, LossOutput
from rollbook.train.model import Model
from rollbook.train.model_settings import OptimizerSettings
from rollbook.train.optimizer import Optimizer
from rollbook.train.processes import Processes
from rollbook.train.schedule import learning_rate
from tiny_model import LLAMA

SETTINGS = OptimizerSettings(learning_rate=0.01)
NLL = CrossEntropy()


def engine(dtype: torch.dtype = torch.float32) -> Engine:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    values = {key: value for key, value in LLAMA.items() if key != "model_type"}
    config = AutoConfig.for_model("llama", vocab_size=61, **values)
    model = Model(AutoModelForCausalLM.from_config(config, dtype=dtype), tokenizer=None)
    model.use_packing(True)
    return Engine(model, Optimizer(model.parameters(), SETTINGS), Processes())


def samples() -> list[Example]:
    chance = np.random.default_rng(0)
    return [
        Example(chance.integers(0, 61, size).astype(np.int32), np.arange(size) > size // 2)
        for size in (5, 30, 12, 3)
    ]


def weights(made: Engine) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in made.model.parameters()]


def test_how_a_batch_is_cut_changes_nothing() -> None:
    whole, parts = engine(), engine()
    some = samples()
    one = whole.step([packed_batch(some)], NLL, 0.01)
    two = parts.step([packed_batch(some[:1]), packed_batch(some[1:])], NLL, 0.01)
    assert two.loss == pytest.approx(one.loss, rel=1e-5)
    assert two.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
    for a, b in zip(weights(whole), weights(parts), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_step_of_several_processes_in_one(dtype: torch.dtype) -> None:
    """Each share is added up by itself, and one without a batch is nothing; two in a row are one share."""
    first, second, third, last = (packed_batch([sample]) for sample in samples())

    def after(*shares: list[Batch]) -> tuple[StepOutput, list[torch.Tensor]]:
        made = engine(dtype)
        return made.step_of_shares(shares, NLL, 0.01), weights(made)

    one, other = after([first, second, last]), after([first], [second], [], [last])
    assert one[0] == other[0]
    assert all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))
    # (a + b) + (c + d) is another sum than ((a + b) + c) + d, but for rounding the same.
    apart, joined = after([first, second], [third, last]), after([first, second, third, last])
    assert apart[0].loss == pytest.approx(joined[0].loss, rel=1e-6)
    assert apart[0].grad_norm == pytest.approx(
        joined[0].grad_norm, rel=1e-2 if dtype is torch.bfloat16 else 1e-5
    )
    assert apart[0].means == pytest.approx(joined[0].means)


class Broken(Loss, tag="broken", frozen=True, kw_only=True):
    """A loss of a user's own, which is nowhere registered."""

    def __call__(self, given: LossInputs) -> LossOutput:
        return LossOutput(given.logprob_N.sum() * float("nan"), {})


def test_a_step_that_is_not_finite_is_void() -> None:
    made = engine()
    before = weights(made)
    result = made.step([packed_batch(samples())], Broken(), 0.01)
    assert not result.applied and np.isnan(result.loss)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(made), strict=True))
    assert made.step([packed_batch(samples())], NLL, 0.01).applied
    assert all(torch.isfinite(weight).all() for weight in weights(made))


def test_small_updates_are_not_lost_in_bfloat16() -> None:
    """At this rate one step is less than the last bit of a bfloat16 weight; a hundred are not."""
    made = engine(torch.bfloat16)
    before = weights(made)
    for _ in range(100):
        made.step([packed_batch(samples())], NLL, 2e-5)
    moved = sum(int((a != b).sum()) for a, b in zip(before, weights(made), strict=True))
    assert moved > 0.5 * sum(weight.numel() for weight in before[-3:])


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_rates_warm_up_and_go_down(kind: Any) -> None:
    rates = [learning_rate(step, peak=1.0, total=20, warmup=4, kind=kind) for step in range(1, 21)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    later = rates[4:]
    assert later == sorted(later, reverse=True) and all(rate > 0 for rate in later)
    assert (rates[-1] == 1.0) == (kind == "constant")
