from __future__ import annotations

from typing import ClassVar

from rollbook.train.losses.base import Loss, LossInputs, LossOutput, weighted_sum


class CrossEntropy(Loss, tag="cross_entropy", frozen=True, kw_only=True):
    """-log pi."""

    samples: ClassVar[bool] = False

    def __call__(self, given: LossInputs) -> LossOutput:
        return LossOutput(weighted_sum(-given.logprob_N, given), {})
