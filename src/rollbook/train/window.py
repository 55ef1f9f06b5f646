"""The numbers of the steps since the last logged one."""

from __future__ import annotations

import time

from rollbook.train.engine import StepResult


class Window:
    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._loss_sum = 0.0
        self._steps = 0
        self._grad_norm = 0.0
        self._tokens = 0
        self._allocated = 0
        self._began = time.monotonic()

    def add(self, result: StepResult) -> None:
        self._loss_sum += result.loss
        self._steps += 1
        self._grad_norm = result.grad_norm
        self._tokens += result.real_tokens
        self._allocated += result.allocated_tokens

    @property
    def _loss(self) -> float:
        return self._loss_sum / max(1, self._steps)

    def values(self, rate: float, epoch: float) -> dict[str, float]:
        return {
            "loss": self._loss,
            "grad_norm": self._grad_norm,
            "learning_rate": rate,
            "epoch": epoch,
            "packing_efficiency": self._tokens / max(1, self._allocated),
        }

    def line(self, rate: float) -> str:
        speed = self._tokens / max(1e-9, time.monotonic() - self._began)
        return f"loss {self._loss:.4f}, grad_norm {self._grad_norm:.3g}, lr {rate:.3g}, {speed:,.0f} tok/s"
