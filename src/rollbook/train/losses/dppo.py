"""Losses that leave a token out when its probability, not its ratio, has moved too far (arXiv 2602.04879).

A rare token may double its probability and move nothing; a likely one cannot. So the band is on pi - mu.
What is left out still pays the penalty for leaving mu, `kl_tau * (log pi - log mu)^2`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec

from rollbook.records.token_masks import dppo_masks, ipo_masks, reference_masks
from rollbook.train.losses.base import (
    LOG_RATIO_CAP,
    Loss,
    LossInputs,
    LossOutput,
    Ratio,
    facts_of,
    has_no_weight,
    ratio_of,
    reasons,
    weighted_sum,
)

if TYPE_CHECKING:
    from torch import Tensor

_Positive = Annotated[float, msgspec.Meta(ge=0)]


class Dppo(Loss, tag="dppo", frozen=True, kw_only=True):
    """-A r + kl_tau (log r)^2; the first term not where A > 0 and pi - mu > high, or A <= 0 and pi - mu <
    -low."""

    mask_low: _Positive = 0.2
    mask_high: _Positive = 0.2
    kl_tau: _Positive = 1e-3

    def __call__(self, given: LossInputs) -> LossOutput:
        ratio, moved_N = ratio_of(given), moved(given)
        advantage_N = given.column("advantage")
        high_N, low_N = dppo_masks(advantage_N, moved_N, mask_low=self.mask_low, mask_high=self.mask_high)
        return _banded(given, ratio, advantage_N, high_N, low_N, self.kl_tau)


class Ipo(Loss, tag="ipo", frozen=True, kw_only=True):
    """-A r + kl_tau (log r)^2; the first term not where |pi - mu| > threshold, whatever the sign of A."""

    threshold: _Positive = 0.1
    kl_tau: _Positive = 1e-3

    def __call__(self, given: LossInputs) -> LossOutput:
        high_N, low_N = ipo_masks(moved(given), threshold=self.threshold)
        return _banded(given, ratio_of(given), given.column("advantage"), high_N, low_N, self.kl_tau)


class ReferenceKl(Loss, tag="reference_kl", frozen=True, kw_only=True):
    """-B r + 0.001 (log r)^2, B = log ref - log pi detached; the first term not where pi - mu < -0.2.

    Learning from a reference model on own samples. The thresholds are fixed and are no settings.
    """

    fixed: ClassVar[tuple[str, ...]] = ("mask_low", "kl_tau")
    mask_low: ClassVar[float] = 0.2
    kl_tau: ClassVar[float] = 1e-3

    def __call__(self, given: LossInputs) -> LossOutput:
        advantage_N = given.column("reference_logprob") - given.logprob_N.detach()
        high_N, low_N = reference_masks(moved(given), mask_low=self.mask_low)
        return _banded(given, ratio_of(given), advantage_N, high_N, low_N, self.kl_tau)


def moved(given: LossInputs) -> Tensor:
    """pi - mu."""
    return given.logprob_N.detach().exp() - given.column("sampled_logprob").exp()


def _banded(
    given: LossInputs, ratio: Ratio, advantage_N: Tensor, high_N: Tensor, low_N: Tensor, kl_tau: float
) -> LossOutput:
    # The advantage and not the product: 0 times one that is not finite would be a gradient of NaN.
    held_N = advantage_N.masked_fill(high_N | low_N | has_no_weight(given), 0.0)
    gained_N = -held_N * ratio.ratio_N
    paid_N = kl_tau * ratio.log_N.clamp(-LOG_RATIO_CAP, LOG_RATIO_CAP).square()
    facts = facts_of(ratio, reasons(high_N, low_N)) | {"prob_delta": moved(given)}
    return LossOutput(weighted_sum(gained_N + paid_N, given), facts)
