"""AdamW over float32 weights, whatever precision the model computes in.

A bfloat16 weight has 8 bits of mantissa: at a learning rate of 1e-5 most updates are smaller than its last
bit and would vanish. So the optimiser keeps a float32 copy, adds up gradients in float32 over the
micro-batches of a step, and rounds once, into the model. A float32 model, and a sharded one, is its own copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rollbook.train.processes import whole
from rollbook.train.settings import TrainingSettings


class Optimizer:
    def __init__(self, parameters: Sequence[nn.Parameter], settings: TrainingSettings) -> None:
        self._parameters = list(parameters)
        self._copies = [_copy(parameter) for parameter in self._parameters]
        self._rounded = [
            (parameter, copy)
            for parameter, copy in zip(self._parameters, self._copies, strict=True)
            if copy is not parameter
        ]
        # Norms and biases are not pulled towards zero.
        decayed = [copy for copy in self._copies if copy.ndim >= 2]
        others = [copy for copy in self._copies if copy.ndim < 2]
        groups = [
            {"params": decayed, "weight_decay": settings.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self._adam = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=settings.learning_rate,
            betas=(settings.adam_beta1, settings.adam_beta2),
            eps=settings.adam_epsilon,
            fused=True,
        )

    def collect(self) -> None:
        """Take over the gradients of a micro-batch; they add up until `step`."""
        into: list[Tensor] = []
        gradients: list[Tensor] = []
        for parameter, copy in self._rounded:
            if parameter.grad is None:
                continue
            if copy.grad is None:
                copy.grad = torch.zeros_like(copy)
            into.append(copy.grad)
            gradients.append(parameter.grad)
            parameter.grad = None
        if into:
            torch._foreach_add_(into, gradients)

    @property
    def takes_over_gradients(self) -> bool:
        """Whether `collect` leaves no gradient behind in the model."""
        return len(self._rounded) == len(self._parameters)

    def clip(self, max_norm: float) -> float:
        """The norm of all gradients together before clipping; not finite means that the step is void."""
        gradients = [copy.grad for copy in self._copies if copy.grad is not None]
        norm = whole(torch.nn.utils.get_total_norm(gradients))
        value = float(norm)
        if torch.isfinite(norm) and max_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(self._copies, max_norm, norm)
        return value

    def step(self, learning_rate: float) -> None:
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        self._adam.step()
        self.forget()
        with torch.no_grad():
            if self._rounded:
                weights, copies = zip(*self._rounded, strict=True)
                torch._foreach_copy_(list(weights), list(copies))

    def forget(self) -> None:
        """Without the gradients collected so far."""
        self._adam.zero_grad(set_to_none=True)
        for parameter in self._parameters:
            parameter.grad = None

    @property
    def torch_optimizer(self) -> torch.optim.Optimizer:
        return self._adam

    def state(self) -> dict[str, Any]:
        copies = [
            None if copy is parameter else copy.detach()
            for parameter, copy in zip(self._parameters, self._copies, strict=True)
        ]
        return {"adam": self._adam.state_dict(), "copies": copies}

    def load(self, state: dict[str, Any]) -> None:
        self._adam.load_state_dict(state["adam"])
        with torch.no_grad():
            for copy, stored in zip(self._copies, state["copies"], strict=True):
                if stored is not None:
                    copy.copy_(stored)


def _copy(parameter: nn.Parameter) -> Tensor:
    if parameter.dtype is torch.float32:
        return parameter
    return parameter.detach().float().requires_grad_()
