from __future__ import annotations

from typing import Annotated

import msgspec

from rollbook.records.token_masks import ppo_masks
from rollbook.train.losses.base import Loss, LossInputs, LossOutput, facts_of, ratio_of, reasons, weighted_sum


class PpoClip(Loss, tag="ppo", frozen=True, kw_only=True):
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), with r = pi / mu.

    A token is clipped where the second one is larger: it is already likelier by more than `clip_high` and
    should become likelier still, or the same downwards. It has no gradient then.
    """

    clip_low: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.2
    clip_high: Annotated[float, msgspec.Meta(ge=0)] = 0.28

    def __call__(self, given: LossInputs) -> LossOutput:
        ratio = ratio_of(given)
        advantage_N = given.column("advantage")
        free_N = -advantage_N * ratio.ratio_N
        clipped_N = -advantage_N * ratio.ratio_N.clamp(1 - self.clip_low, 1 + self.clip_high)
        high_N, low_N = ppo_masks(
            advantage_N, ratio.ratio_N.detach(), clip_low=self.clip_low, clip_high=self.clip_high
        )
        loss_N = clipped_N.where(high_N | low_N, free_N)
        return LossOutput(weighted_sum(loss_N, given), facts_of(ratio, reasons(high_N, low_N)))
