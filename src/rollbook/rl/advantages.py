"""Advantages of a group: how much better each rollout did than the others of the same task.

Each function takes the total rewards of one group and returns one advantage per rollout. A group whose
rewards do not differ teaches nothing, so it gets exactly 0 everywhere: never the rounding error of a mean,
divided by a standard deviation that is a rounding error too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

Rewards = np.ndarray[Any, np.dtype[np.float64]]
Name = Literal["mean", "std", "leave_one_out"]

# Rewards that differ by less than this part of the largest one are equal.
_SAME = 1e-6


def is_constant(rewards_G: Rewards) -> bool:
    """Whether a group has fewer than two rollouts or only one reward."""
    return len(rewards_G) < 2 or bool(are_equal(rewards_G.min(), rewards_G.max()))


def are_equal(lowest: Any, highest: Any) -> Any:
    """Whether rewards between these two count as equal: of one group, or of many as arrays."""
    largest = np.maximum(1.0, np.maximum(np.abs(lowest), np.abs(highest)))
    return highest - lowest <= _SAME * largest


def mean(rewards_G: Rewards) -> Rewards:
    """R - mean(R)."""
    centred_G: Rewards = rewards_G - rewards_G.mean()
    return centred_G


def std(rewards_G: Rewards) -> Rewards:
    """(R - mean(R)) / sd(R), with the standard deviation of a sample (n - 1)."""
    scaled_G: Rewards = mean(rewards_G) / rewards_G.std(ddof=1)
    return scaled_G


def leave_one_out(rewards_G: Rewards) -> Rewards:
    """R - the mean of the other rollouts, which is n / (n - 1) times the distance from the mean."""
    return mean(rewards_G) * (len(rewards_G) / (len(rewards_G) - 1))


FORMULAS: dict[Name, Callable[[Rewards], Rewards]] = {
    "mean": mean,
    "std": std,
    "leave_one_out": leave_one_out,
}


def advantages(rewards_G: Rewards, name: Name) -> Rewards:
    """The advantage of each rollout of a group; all 0 where the group teaches nothing."""
    rewards_G = np.asarray(rewards_G, dtype=np.float64)
    return np.zeros_like(rewards_G) if is_constant(rewards_G) else FORMULAS[name](rewards_G)
