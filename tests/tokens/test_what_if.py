"""A what-if is what the loss would have done: one rule over numpy's arrays and over torch's tensors."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.records.tokens import TokenSequence
from rollbook.tokens.chunks import Chunk
from rollbook.tokens.what_if import BOUNDS, changed, left_out
from rollbook.train.losses import (
    CrossEntropy,
    Dppo,
    ImportanceSampling,
    Ipo,
    Loss,
    PpoClip,
    Reason,
    ReferenceKl,
)
from rollbook.train.losses.base import LossInputs

LOSSES: list[type[Loss]] = [CrossEntropy, ImportanceSampling, PpoClip, Dppo, Ipo, ReferenceKl]
BOUND = st.floats(0, 1, width=32)


def name_of(kind: type[Loss]) -> str:
    return str(kind.__struct_config__.tag)


def test_every_loss_has_its_bounds_and_defaults_here() -> None:
    assert {name_of(kind) for kind in LOSSES} == BOUNDS.keys()
    for kind in LOSSES:
        plain = kind().described()
        known = {"name": name_of(kind), **BOUNDS[name_of(kind)]}
        assert known.items() <= plain.items()
        assert set(plain) - set(known) <= {"kl_tau"}  # which leaves nothing out


@pytest.mark.parametrize("kind", LOSSES, ids=name_of)
@given(data=st.data(), seed=st.integers(0, 10_000), size=st.integers(1, 60))
@settings(max_examples=40, deadline=None)
def test_the_masks_are_those_of_the_loss(kind: type[Loss], data: st.DataObject, seed: int, size: int) -> None:
    bounds = {name: data.draw(BOUND) for name in BOUNDS[name_of(kind)]}
    loss = with_bounds(kind, bounds)
    chance = np.random.default_rng(seed)
    mu_N = -chance.exponential(0.7, size).astype(np.float32)
    pi_N = (mu_N + chance.normal(0, chance.choice([0.01, 0.3, 30]), size)).clip(max=0).astype(np.float32)
    advantage_N = chance.choice(np.array([-1.5, -0.1, 0.0, 0.2, 3.0], np.float32), size)
    for column_N in (mu_N, pi_N, advantage_N):
        column_N[chance.random(size) < 0.05] = chance.choice([np.nan, -np.inf])
    columns = {"sampled_logprob": mu_N, "advantage": advantage_N, "reference_logprob": mu_N}
    inputs = LossInputs(
        torch.from_numpy(pi_N),
        torch.zeros(size),
        {name: torch.from_numpy(one) for name, one in columns.items()},
    )
    facts = loss(inputs).facts_N
    ratio_N = facts["ratio"].numpy() if "ratio" in facts else None
    chunk = Chunk([sequence(mu_N, pi_N, advantage_N, ratio_N)])
    manifest = msgspec.json.decode(msgspec.json.encode(loss.described())) | {"name": name_of(kind)}
    scenario = changed(manifest, {}, "")
    assert scenario == {"name": name_of(kind), **bounds}
    high_N, low_N, known_N = left_out(scenario, chunk)
    if "reason" not in facts:
        assert not (high_N | low_N).any()
        return
    reason_N = facts["reason"].numpy()
    # A change of probability within a rounding of a bound may fall on either side of it.
    moved_N = facts["prob_delta"].numpy() if "prob_delta" in facts else np.full(size, np.inf)
    edges = [*bounds.values(), 0.2]
    clear_N = np.min([np.abs(np.abs(moved_N) - edge) for edge in edges], axis=0) > 1e-6
    clear_N |= np.isnan(moved_N)
    assert known_N.all()
    assert (high_N == (reason_N == Reason.CLIPPED_HIGH))[clear_N].all()
    assert (low_N == (reason_N == Reason.CLIPPED_LOW))[clear_N].all()


def with_bounds(kind: type[Loss], bounds: dict[str, float]) -> Loss:
    """The loss with other thresholds, also where they are no settings of it."""
    if kind is not ReferenceKl:
        return kind(**bounds)

    class Changed(ReferenceKl, tag="changed", frozen=True, kw_only=True):
        mask_low: ClassVar[float] = bounds["mask_low"]

    return Changed()


def test_fixed_thresholds_are_those_of_the_manifest() -> None:
    assert ReferenceKl().described() == {"name": "reference_kl", "mask_low": 0.2, "kl_tau": 0.001}
    other = {"name": "reference_kl", "mask_low": 0.05, "kl_tau": 0.5}
    assert changed(other, {}, "") == {"name": "reference_kl", "mask_low": 0.05}
    assert changed({"name": "reference_kl"}, {}, "")["mask_low"] == 0.2  # as older manifests have it
    assert changed(other, {"name": "dppo"}, "") == {"name": "dppo", "mask_low": 0.2, "mask_high": 0.2}


def sequence(mu_N: Any, pi_N: Any, advantage_N: Any, ratio_N: Any) -> TokenSequence:
    return TokenSequence(
        run_id="run",
        split="train",
        iteration=0,
        columns={
            "token_ids": np.arange(len(mu_N), dtype=np.int32),
            "loss_mask": np.ones(len(mu_N), np.bool_),
            "advantages": advantage_N,
            "inference_logprobs": mu_N,
            "trainer_logprobs": pi_N,
            "importance_ratio": ratio_N,
        },
    )
