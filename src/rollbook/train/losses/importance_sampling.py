from __future__ import annotations

from rollbook.train.losses.base import Loss, LossInputs, LossOutput, facts_of, ratio_of, reasons, weighted_sum


class ImportanceSampling(Loss, tag="importance_sampling", frozen=True, kw_only=True):
    """-A r, with r = pi / mu."""

    def __call__(self, given: LossInputs) -> LossOutput:
        ratio = ratio_of(given)
        loss_N = -given.column("advantage") * ratio.ratio_N
        none_N = ratio.clamped_N & False
        return LossOutput(weighted_sum(loss_N, given), facts_of(ratio, reasons(none_N, none_N)))
