"""The columns of a token export that follow from others, by one formula for writers and readers."""

from __future__ import annotations

from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float32]]


def derived(inference: Floats | None, trainer: Floats | None) -> dict[str, Floats | None]:
    """Log ratio, KL (`exp(lr) - lr - 1`) and change of probability, made in float64; NaN where one is NaN.

    All are None where one of the two columns does not apply.
    """
    if inference is None or trainer is None:
        return dict.fromkeys(("log_importance_ratio", "mismatch_kl", "prob_delta"))
    mu, pi = inference.astype(np.float64), trainer.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        log_ratio = pi - mu
        return {
            "log_importance_ratio": log_ratio.astype(np.float32),
            "mismatch_kl": (np.expm1(log_ratio) - log_ratio).astype(np.float32),
            "prob_delta": (np.exp(pi) - np.exp(mu)).astype(np.float32),
        }
