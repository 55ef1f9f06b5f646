"""Which tokens a loss leaves out, as rules over one value per token.

The losses apply them to torch's tensors and readers to numpy's arrays, both float32. So what a reader says
about other thresholds is what the loss would have done, and no reader needs torch. A rule returns two masks:
left out by the upper bound, and by the lower one.
"""

from __future__ import annotations

from typing import Any

Values = Any  # a tensor or an array
Masks = tuple[Values, Values]


def ppo_masks(advantage: Values, ratio: Values, *, clip_low: float, clip_high: float) -> Masks:
    """Where the clipped ratio makes the larger loss: the token has moved far enough, and would move on."""
    is_clipped = -advantage * ratio < -advantage * ratio.clip(1 - clip_low, 1 + clip_high)
    return is_clipped & (advantage > 0), is_clipped & (advantage <= 0)


def dppo_masks(advantage: Values, moved: Values, *, mask_low: float, mask_high: float) -> Masks:
    """`moved` is the change of probability. It may fall as far as it likes where the advantage is above 0,
    and rise where it is not."""
    rises = advantage > 0
    return rises & (moved > mask_high), ~rises & (moved < -mask_low)


def ipo_masks(moved: Values, *, threshold: float) -> Masks:
    """Whatever the advantage."""
    return moved > threshold, moved < -threshold


def reference_masks(moved: Values, *, mask_low: float) -> Masks:
    """What has become much less likely."""
    low = moved < -mask_low
    return low & ~low, low
