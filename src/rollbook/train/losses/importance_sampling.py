from __future__ import annotations

import torch

from rollbook.train.losses.base import (
    Loss,
    LossInputs,
    LossOutput,
    Reason,
    facts_of,
    ratio_of,
    reasons,
    weighted_sum,
)


class ImportanceSampling(Loss, tag="importance_sampling", frozen=True, kw_only=True):
    """-A r, with r = pi / mu."""

    def __call__(self, given: LossInputs) -> LossOutput:
        ratio = ratio_of(given)
        loss_N = -given.column("advantage") * ratio.ratio_N
        everything_N = torch.ones_like(ratio.clamped_N)
        return LossOutput(weighted_sum(loss_N, given), facts_of(ratio, reasons(everything_N, Reason.TRAINED)))
