"""Each loss is its formula: against hand-computed numbers, finite differences and expectations."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from rollbook.train.losses import (
    AnyLoss,
    CrossEntropy,
    Dppo,
    ImportanceSampling,
    Ipo,
    Loss,
    LossInputs,
    LossOutput,
    PpoClip,
    Reason,
    ReferenceKl,
)

LOSSES = [CrossEntropy(), ImportanceSampling(), PpoClip(), Dppo(kl_tau=0.3), Ipo(kl_tau=0.3), ReferenceKl()]


def inputs(logprob_N: Tensor, **columns_N: Any) -> LossInputs:
    columns = {name: torch.as_tensor(value, dtype=logprob_N.dtype) for name, value in columns_N.items()}
    return LossInputs(logprob_N, torch.zeros(len(logprob_N), dtype=torch.int64), columns)


def random_inputs(count: int = 40, *, seed: int = 0) -> LossInputs:
    """float64, likely tokens among them, so that some leave every band."""
    chance = torch.Generator().manual_seed(seed)

    def drawn(scale: float) -> Tensor:
        return -scale * torch.rand(count, generator=chance, dtype=torch.float64)

    logprob_N = drawn(2.0)
    advantage_N = torch.randn(count, generator=chance, dtype=torch.float64)
    return inputs(
        logprob_N,
        sampled_logprob=logprob_N + torch.randn(count, generator=chance, dtype=torch.float64) * 0.4,
        advantage=advantage_N,
        reference_logprob=drawn(3.0),
        weight=torch.rand(count, generator=chance, dtype=torch.float64),
    )


@pytest.mark.parametrize("loss", [one for one in LOSSES if not isinstance(one, ReferenceKl)], ids=repr)
def test_gradients_are_finite_differences(loss: Loss) -> None:
    given = random_inputs()

    def total(logprob_N: Tensor) -> Tensor:
        return loss(given._replace(logprob_N=logprob_N)).loss_sum

    assert torch.autograd.gradcheck(total, (given.logprob_N.requires_grad_(),), eps=1e-7, atol=1e-6)
    reasons = loss(given).facts_N.get("reason", torch.zeros(1)).unique()
    assert len(reasons) > 1 or isinstance(
        loss, CrossEntropy | ImportanceSampling
    )  # both sides were differentiated


def test_reference_kl_is_the_formula_with_its_advantage_held() -> None:
    given = random_inputs()
    held_N = given.columns_N["reference_logprob"] - given.logprob_N
    mu_N, weight_N = given.columns_N["sampled_logprob"], given.columns_N["weight"]

    def by_hand(logprob_N: Tensor) -> Tensor:
        kept_N = (given.logprob_N.exp() - mu_N.exp()) >= -0.2
        log_N = logprob_N - mu_N
        return (weight_N * (-kept_N.double() * held_N * log_N.exp() + 1e-3 * log_N**2)).sum()

    logprob_N = given.logprob_N.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(by_hand(logprob_N), logprob_N)
    made = ReferenceKl()(given._replace(logprob_N=logprob_N))
    (found,) = torch.autograd.grad(made.loss_sum, logprob_N)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(made.loss_sum, by_hand(given.logprob_N))
    assert 0 < int((made.facts_N["reason"] == Reason.CLIPPED_LOW).sum()) < len(logprob_N)


def test_ppo_clips_each_side_by_its_own_bound() -> None:
    ratio_N = torch.tensor([1.5, 1.5, 0.7, 0.7, 1.25, 0.9])
    advantage_N = [2.0, -2.0, 2.0, -2.0, 1.0, -1.0]
    made = PpoClip(clip_low=0.2, clip_high=0.28)(
        inputs(ratio_N.log(), sampled_logprob=torch.zeros(6), advantage=advantage_N)
    )
    by_hand = [-2 * 1.28, 2 * 1.5, -2 * 0.7, 2 * 0.8, -1.25, 0.9]
    assert float(made.loss_sum) == pytest.approx(sum(by_hand), rel=1e-6)
    high, low, trained = Reason.CLIPPED_HIGH, Reason.CLIPPED_LOW, Reason.TRAINED
    assert made.facts_N["reason"].tolist() == [high, trained, trained, low, trained, trained]
    assert made.facts_N["kept"].tolist() == [False, True, True, False, True, True]
    torch.testing.assert_close(made.facts_N["ratio"], ratio_N)


@pytest.mark.parametrize(
    ("loss", "reasons"),
    [
        # pi - mu: 0.3, 0.3, -0.3, -0.3, 0.15, 0.05; the third and fourth of probability 0.2
        (Dppo(), [Reason.CLIPPED_HIGH, 0, 0, Reason.CLIPPED_LOW, 0, 0]),
        (Dppo(mask_low=0.4, mask_high=0.1), [Reason.CLIPPED_HIGH, 0, 0, 0, Reason.CLIPPED_HIGH, 0]),
        (Ipo(), [Reason.CLIPPED_HIGH] * 2 + [Reason.CLIPPED_LOW] * 2 + [Reason.CLIPPED_HIGH, 0]),
    ],
    ids=repr,
)
def test_bands_are_on_probabilities(loss: Loss, reasons: list[int]) -> None:
    mu_N = torch.tensor([0.5, 0.5, 0.5, 0.5, 0.5, 0.05])
    pi_N = torch.tensor([0.8, 0.8, 0.2, 0.2, 0.65, 0.1])
    advantage_N = [1.0, -1.0, 1.0, -1.0, 1.0, 1.0]
    made = loss(inputs(pi_N.log(), sampled_logprob=mu_N.log(), advantage=advantage_N))
    assert made.facts_N["reason"].tolist() == reasons
    torch.testing.assert_close(made.facts_N["prob_delta"], pi_N - mu_N)
    kept_N = made.facts_N["kept"].double()
    log_N = (pi_N / mu_N).log().double()
    by_hand = -kept_N * torch.tensor(advantage_N) * log_N.exp() + 1e-3 * log_N**2
    assert float(made.loss_sum) == pytest.approx(float(by_hand.sum()), rel=1e-5)


@pytest.mark.parametrize("loss", [ImportanceSampling(), PpoClip(), Dppo(), Ipo(), ReferenceKl()], ids=repr)
def test_t08_on_policy_every_ratio_is_exactly_one(loss: Loss) -> None:
    given = random_inputs()
    given.columns_N["sampled_logprob"] = given.logprob_N.clone()  # type: ignore[index]
    facts = loss(given).facts_N
    assert (
        bool((facts["ratio"] == 1.0).all()) and bool(facts["kept"].all()) and not bool(facts["clamped"].any())
    )


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_t16_what_is_left_out_may_be_infinite(loss: Loss) -> None:
    """A token that is impossible now, one that was when it was sampled, and one of weight 0 without a
    value."""
    logprob_N = torch.tensor([-1.0, -math.inf, -0.01, -1.0, -50.0]).requires_grad_()
    given = inputs(
        logprob_N,
        sampled_logprob=[-1.1, -0.5, -math.inf, math.nan, -0.1],
        reference_logprob=[-1.0, -1.0, -1.0, math.nan, -1.0],
        advantage=[1.0, 1.0, -1.0, 1.0, 1.0],
        weight=[1.0, 0.0 if isinstance(loss, CrossEntropy | ReferenceKl) else 1.0, 1.0, 0.0, 1.0],
    )
    made = loss(given)
    made.loss_sum.backward()
    assert torch.isfinite(made.loss_sum) and torch.isfinite(logprob_N.grad).all()
    if "clamped" in made.facts_N:  # beyond exp(20) a ratio is not believed, and counted
        assert made.facts_N["clamped"].tolist() == [False, True, True, False, True]
        assert logprob_N.grad[2] == 0.0


def expected(loss: Loss, logits_V: Tensor, mu_V: Tensor, **columns_V: Tensor) -> LossOutput:
    """A loss with every token of a vocabulary once, as often as it is sampled."""
    return loss(inputs(logits_V.log_softmax(-1), sampled_logprob=mu_V.log(), weight=mu_V, **columns_V))


def differences(function: Any, at: Tensor, eps: float = 1e-6) -> Tensor:
    found = torch.zeros_like(at)
    for place in range(len(at)):
        step = torch.zeros_like(at)
        step[place] = eps
        found[place] = (function(at + step) - function(at - step)) / (2 * eps)
    return found


def test_t20_terms_have_the_gradient_of_what_they_estimate() -> None:
    """On three tokens: the penalty of its expectation, the ratio of the reward, reference_kl of KL(pi ||
    ref)."""
    logits_V = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64)
    mu_V = torch.tensor([0.4, 0.3, 0.3], dtype=torch.float64)
    ref_V = torch.tensor([0.2, 0.45, 0.35], dtype=torch.float64)
    advantage_V = torch.tensor([1.0, -0.5, 0.25], dtype=torch.float64)

    def gradient(loss: Loss, **columns_V: Tensor) -> Tensor:
        at = logits_V.clone().requires_grad_()
        (found,) = torch.autograd.grad(expected(loss, at, mu_V, **columns_V).loss_sum, at)
        return found

    def penalty(at: Tensor) -> Tensor:
        return (mu_V * 0.7 * (at.log_softmax(-1) - mu_V.log()) ** 2).sum()

    def reward(at: Tensor) -> Tensor:
        return (at.softmax(-1) * advantage_V).sum()

    def kl_to_reference(at: Tensor) -> Tensor:
        return (at.softmax(-1) * (at.log_softmax(-1) - ref_V.log())).sum()

    def close(found: Tensor, wanted: Tensor) -> None:
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-8)

    close(gradient(Dppo(kl_tau=0.7), advantage=torch.zeros(3)), differences(penalty, logits_V))
    close(gradient(ImportanceSampling(), advantage=advantage_V), -differences(reward, logits_V))
    with_penalty = gradient(ReferenceKl(), reference_logprob=ref_V.log())
    close(with_penalty - differences(penalty, logits_V) * 1e-3 / 0.7, differences(kl_to_reference, logits_V))


def test_a_loss_is_its_config() -> None:
    read = msgspec.convert({"name": "ppo", "clip_high": 0.3}, AnyLoss)
    assert read == PpoClip(clip_high=0.3)
    assert msgspec.to_builtins(read) == {"name": "ppo", "clip_low": 0.2, "clip_high": 0.3}
    for loss in LOSSES:
        assert msgspec.convert(msgspec.to_builtins(loss), AnyLoss) == loss
    with pytest.raises(msgspec.ValidationError, match="unknown field `clip`"):
        msgspec.convert({"name": "ppo", "clip": 0.3}, AnyLoss)
    with pytest.raises(msgspec.ValidationError, match="clip_low"):
        msgspec.convert({"name": "ppo", "clip_low": -1}, AnyLoss)


def test_a_missing_column_is_named() -> None:
    with pytest.raises(ValueError, match="the loss needs the column 'advantage'"):
        PpoClip()(inputs(torch.zeros(2), sampled_logprob=[0.0, 0.0]))
