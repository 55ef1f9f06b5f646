"""Learning rates as a function of the step: warm-up, then cosine, linear or constant."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["cosine", "linear", "constant"]


def learning_rate(step: int, *, peak: float, total: int, warmup: int, kind: Schedule) -> float:
    """The rate that step `step`, counted from 1, is taken with."""
    if step <= warmup:
        return peak * step / max(1, warmup)
    if kind == "constant":
        return peak
    done = (step - 1 - warmup) / max(1, total - warmup)
    if kind == "linear":
        return peak * max(0.0, 1.0 - done)
    return peak * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
