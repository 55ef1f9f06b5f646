"""A loss says that a bound left a token out exactly where that bound took its gradient away."""

from __future__ import annotations

import math
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.train.batch import Batch, Example, ExampleKey, packed_batch, padded_batch
from rollbook.train.losses import (
    CrossEntropy,
    Dppo,
    ImportanceSampling,
    Ipo,
    Loss,
    LossInputs,
    PpoClip,
    Reason,
    ReferenceKl,
)
from rollbook.train.losses.base import LOG_RATIO_CAP


class ReferenceGain(ReferenceKl, tag="reference_gain", frozen=True, kw_only=True):
    """The loss without its penalty, which the tokens that are left out pay as well."""

    kl_tau: ClassVar[float] = 0.0


class Token(NamedTuple):
    is_trained: bool
    sampled_logprob: float
    logprob: float
    advantage: float
    reference_logprob: float
    weight: float
    turn: int


BOUND = st.sampled_from([0.0, 0.001, 0.1, 0.2, 0.28, 1.0])
LOSSES: dict[str, st.SearchStrategy[Loss]] = {
    "cross_entropy": st.just(CrossEntropy()),
    "importance_sampling": st.just(ImportanceSampling()),
    "ppo": st.builds(PpoClip, clip_low=BOUND, clip_high=BOUND),
    "dppo": st.builds(Dppo, mask_low=BOUND, mask_high=BOUND, kl_tau=st.just(0.0)),
    "ipo": st.builds(Ipo, threshold=BOUND, kl_tau=st.just(0.0)),
    "reference_kl": st.just(ReferenceGain()),
}
ODD = st.sampled_from([math.nan, -math.inf, 0.0, -1e-6, -30.0])
LIKELY = st.integers(-3000, 0).map(lambda thousandths: thousandths / 1000)
LOGPROB = st.one_of(LIKELY, LIKELY, LIKELY, ODD)


@st.composite
def tokens(draw: st.DrawFn) -> Token:
    mu = draw(LOGPROB)
    near = min(0.0, mu + draw(st.integers(-500, 500)) / 1000)
    return Token(
        is_trained=draw(st.booleans()),
        sampled_logprob=mu,
        logprob=near if draw(st.booleans()) else draw(LOGPROB),
        advantage=draw(st.sampled_from([0.0, 1.0, -1.0, 0.37, -2.5, 1e-3])),
        reference_logprob=draw(LOGPROB),
        weight=draw(st.sampled_from([1.0, 1.0, 0.5, 0.0])),
        turn=draw(st.integers(0, 2)),
    )


ROWS = st.lists(st.lists(tokens(), min_size=1, max_size=10), min_size=1, max_size=4)


def example_of(row: list[Token], number: int, has_weights: bool) -> Example:
    names = ["sampled_logprob", "advantage", "reference_logprob"] + ["weight"] * has_weights
    columns_T: dict[str, Any] = {
        name: np.array([getattr(token, name) for token in row], np.float32) for name in names
    }
    columns_T["turn"] = np.sort(np.array([token.turn for token in row], np.int32))
    trained_T = np.array([token.is_trained for token in row])
    ids_T = np.arange(len(row), dtype=np.int32)
    return Example(ids_T, trained_T, columns_T, ExampleKey("train", 0, 0, number))


HIGH, LOW = Reason.CLIPPED_HIGH, Reason.CLIPPED_LOW
# What each loss is to have said of some token, so that nothing below is shown of no token at all.
REASONS = {
    "cross_entropy": set(), "importance_sampling": {Reason.TRAINED},
    "ppo": {Reason.TRAINED, HIGH, LOW}, "dppo": {Reason.TRAINED, HIGH, LOW},
    "ipo": {Reason.TRAINED, HIGH, LOW}, "reference_kl": {Reason.TRAINED, LOW},
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_a_reason_stands_where_a_bound_took_the_gradient(name: str) -> None:
    found: set[int] = set()

    @given(loss=LOSSES[name], rows=ROWS, has_weights=st.booleans(), is_packed=st.booleans())
    @settings(max_examples=150, deadline=None)
    def hold(loss: Loss, rows: list[list[Token]], has_weights: bool, is_packed: bool) -> None:
        examples = [example_of(row, number, has_weights) for number, row in enumerate(rows)]
        batch = (packed_batch if is_packed else padded_batch)(examples)
        places = zip(batch.example_N.tolist(), batch.offset_N.tolist(), strict=True)
        seen = [rows[example][offset] for example, offset in places]
        assert len(seen) == sum(token.is_trained for row in rows for token in row[1:])
        found.update(check(loss, batch, seen, has_weights))

    hold()
    assert found == REASONS[name]


def check(loss: Loss, batch: Batch, seen: list[Token], has_weights: bool) -> set[int]:
    """The reasons of tokens whose gradient a bound took, or could have taken."""
    logprob_N = torch.tensor([token.logprob for token in seen], dtype=torch.float32).requires_grad_()
    made = loss(LossInputs(logprob_N, batch.example_N, batch.columns_N))
    (gradient_N,) = torch.autograd.grad(made.loss_sum, logprob_N)
    if "reason" not in made.facts_N:
        assert gradient_N.tolist() == [-token.weight if has_weights else -1.0 for token in seen]
        return set()
    without = {name: column_N for name, column_N in batch.columns_N.items() if name != "weight"}
    unweighted = loss(LossInputs(logprob_N, batch.example_N, without))
    assert torch.equal(made.facts_N["reason"], unweighted.facts_N["reason"])
    found = set()
    facts = [made.facts_N[fact].tolist() for fact in ("reason", "kept", "clamped")]
    for token, gradient, reason, kept, clamped in zip(seen, gradient_N.tolist(), *facts, strict=True):
        assert kept == (reason == Reason.TRAINED)
        pi, mu = np.float32(token.logprob), np.float32(token.sampled_logprob)
        with np.errstate(invalid="ignore"):
            log_ratio, held = pi - mu, np.float32(token.reference_logprob) - pi
        advantage = held if isinstance(loss, ReferenceKl) else token.advantage
        assert clamped == (abs(log_ratio) > LOG_RATIO_CAP)
        assert reason == Reason.TRAINED or (reason == HIGH) == (pi > mu)
        if reason != Reason.TRAINED or (has_weights and token.weight == 0):
            assert gradient == 0, token  # whatever its numbers are
        elif math.isnan(log_ratio):
            assert not made.loss_sum.isfinite()  # so the whole step is void
        elif clamped:
            assert gradient == 0 or not math.isfinite(advantage), token
        else:
            assert (gradient == 0) == (advantage == 0), token
        if not clamped and advantage != 0 and not (has_weights and token.weight == 0):
            found.add(reason)
    return found
