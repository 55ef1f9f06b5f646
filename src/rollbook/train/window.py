"""The numbers of the steps since the last logged one.

They live in the state of the run, so a checkpoint between two logged steps holds them, and the line that a
resumed run writes next is about the same steps as that of a run that was never killed.
"""

from __future__ import annotations

import time

from rollbook.train.engine import StepOutput

Sums = dict[str, float]


class Window:
    def __init__(self, sums: Sums) -> None:
        """`sums` is the place in the state; it is changed there."""
        self._sums = sums
        self._tokens_here, self._began = 0, time.monotonic()
        if not sums:
            self.clear()

    def clear(self) -> None:
        self._sums.update(loss=0.0, steps=0, grad_norm=0.0, tokens=0, allocated=0)
        self._tokens_here, self._began = 0, time.monotonic()

    def add(self, result: StepOutput) -> None:
        sums = self._sums
        sums["loss"] += result.loss
        sums["steps"] += 1
        sums["grad_norm"] = result.grad_norm
        sums["tokens"] += result.real_tokens
        sums["allocated"] += result.allocated_tokens
        self._tokens_here += result.real_tokens

    def values(self, rate: float, epoch: float) -> dict[str, float]:
        sums = self._sums
        return {
            "loss": sums["loss"] / max(1, sums["steps"]),
            "grad_norm": sums["grad_norm"],
            "learning_rate": rate,
            "epoch": epoch,
            "packing_efficiency": sums["tokens"] / max(1, sums["allocated"]),
        }

    @property
    def tokens_per_second(self) -> float:
        return self._tokens_here / max(1e-9, time.monotonic() - self._began)
