"""AdamW over float32 weights, whatever precision the model computes in.

A bfloat16 weight has 8 bits of mantissa: at a learning rate of 1e-5 most updates are smaller than its last
bit and would vanish. So the optimiser keeps a float32 copy, adds up gradients in float32 over the
micro-batches of a step, and rounds once, into the model. A float32 model, and a sharded one, is its own copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from rollbook.train.memory import GRADIENT_BYTES, MOMENT_BYTES
from rollbook.train.model_settings import OptimizerSettings
from rollbook.train.processes import whole


class Optimizer:
    def __init__(self, parameters: Sequence[nn.Parameter], settings: OptimizerSettings) -> None:
        self._max_grad_norm = settings.max_grad_norm
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
            betas=settings.betas,
            eps=settings.eps,
            fused=True,
        )

    @property
    def weights(self) -> list[Tensor]:
        """The float32 weights, whose gradients are those of the step so far."""
        return self._copies

    def accumulate(self) -> None:
        """Takes over the gradients of a micro-batch; they add up until `step`."""
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

    def take_gradients(self) -> list[Tensor | None]:
        """What `accumulate` has added up for each weight; the next gradients begin anew."""
        taken = [copy.grad for copy in self._copies]
        for copy in self._copies:
            copy.grad = None
        return taken

    def add_gradients(self, taken: Sequence[Tensor | None]) -> None:
        """Put back what was taken, with what came since on top of it."""
        for copy, gradient in zip(self._copies, taken, strict=True):
            if gradient is not None:
                copy.grad = gradient if copy.grad is None else gradient.add_(copy.grad)

    @property
    def bytes_to_come(self) -> int:
        """What the first step will take: the moments that are not there yet, and the gradients."""
        new = sum(copy.numel() for copy in self._copies if copy not in self._adam.state)
        return new * MOMENT_BYTES + sum(copy.numel() for copy in self._copies) * GRADIENT_BYTES

    @property
    def frees_model_gradients(self) -> bool:
        """Whether `accumulate` leaves no gradient behind in the model."""
        return len(self._rounded) == len(self._parameters)

    def clip(self) -> float:
        """The norm of all gradients together before clipping; not finite means that the step is void."""
        norm = self.gradient_norm()
        value = float(norm)
        if math.isfinite(value) and self._max_grad_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(self._copies, self._max_grad_norm, norm)
        return value

    def gradient_norm(self) -> Tensor:
        """The norm of all gradients together."""
        gradients = [copy.grad for copy in self._copies if copy.grad is not None]
        return whole(torch.nn.utils.get_total_norm(gradients))

    def step(self, learning_rate: float) -> None:
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        self._adam.step()
        self.zero_grad()
        with torch.no_grad():
            if self._rounded:
                weights, copies = zip(*self._rounded, strict=True)
                torch._foreach_copy_(list(weights), list(copies))

    def zero_grad(self) -> None:
        """Drops the gradients accumulated so far."""
        self._adam.zero_grad(set_to_none=True)
        for parameter in self._parameters:
            parameter.grad = None

    def tensors(self) -> list[dict[str, Tensor]]:
        """What is kept for each parameter, in their order: Adam's state, and the float32 copy as `copy`."""
        kept = []
        for parameter, copy in zip(self._parameters, self._copies, strict=True):
            own = {name: torch.as_tensor(value) for name, value in self._adam.state.get(copy, {}).items()}
            kept.append(own if copy is parameter else own | {"copy": copy.detach()})
        return kept

    def check(self, stored: Sequence[Mapping[str, Tensor]]) -> None:
        """ValueError unless this is what `tensors` returned of the same parameters."""
        for parameter, copy, tensors in zip(self._parameters, self._copies, stored, strict=True):
            if copy is not parameter and "copy" not in tensors:
                raise ValueError("the weights were kept in another precision; set model.dtype as it was")
            for name, tensor in tensors.items():
                if name != "step" and (tensor.shape, tensor.dtype) != (copy.shape, copy.dtype):
                    found, wanted = ((tuple(one.shape), one.dtype) for one in (tensor, copy))
                    raise ValueError(f"{name} is of {found}, and its weight of {wanted}")
            moments = tensors.keys() - {"copy"}
            if moments and moments != {"step", "exp_avg", "exp_avg_sq"}:
                raise ValueError(f"{', '.join(sorted(moments))} is not what Adam keeps")

    @torch.no_grad()
    def restore(self, stored: Iterable[Mapping[str, Tensor]]) -> None:
        """Take over what `check` has passed, one parameter after the other.

        A float32 copy that was kept is taken over by a weight that is float32 itself.
        """
        for copy, tensors in zip(self._copies, stored, strict=True):
            own = {name: _placed(tensor, copy) for name, tensor in tensors.items()}
            if (weight := own.pop("copy", None)) is not None:
                copy.copy_(weight)
            if own:
                self._adam.state[copy] = own


def _placed(tensor: Tensor, like: Tensor) -> Tensor:
    """On the device of `like`, and sharded as it is."""
    if tensor.ndim and isinstance(like, DTensor):
        # Every process has it whole, so each takes its own share of it.
        return distribute_tensor(
            tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None
        )
    return tensor.to(like.device, copy=True)  # out of the mapped file


def _copy(parameter: nn.Parameter) -> Tensor:
    if parameter.dtype is torch.float32:
        return parameter
    return parameter.detach().float().requires_grad_()
