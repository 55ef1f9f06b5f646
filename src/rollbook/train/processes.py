"""One process or several: who am I, and what do all of us together have?

Started by torchrun there are several. The model is then sharded over them by FSDP2, or each has a copy of
it and gradients are added up; otherwise there is one and every question here has the simple answer. The
code of a job asks and never branches.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

T = TypeVar("T")
_LONGEST_WAIT = timedelta(hours=12)
_BUCKET = 32 * 2**20  # bytes of gradients that travel together


class Processes:
    """All processes of a job, as one of them sees them."""

    def __init__(self) -> None:
        self.count = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if torch.cuda.is_available():
            torch.cuda.set_device(local)
            self.device = torch.device("cuda", local)
        else:
            self.device = torch.device("cpu")
        self._sharded = False
        if self.are_several and not dist.is_initialized():
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            # The others wait while the first one samples, evaluates and saves.
            dist.init_process_group(backend, timeout=_LONGEST_WAIT)

    @property
    def are_several(self) -> bool:
        return self.count > 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, value: float) -> float:
        """The sum over all processes."""
        return float(self.sum_all(torch.tensor(value, dtype=torch.float64, device=self.device)))

    def sum_all(self, values: Tensor) -> Tensor:
        """The sums over all processes, in one go."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def largest(self, values: Tensor) -> Tensor:
        """The largest values of all processes."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def scatter(self, shares: Sequence[T | None] | None = None) -> T | None:
        """The share of this process. The first one has one for each, the others pass nothing and wait."""
        if not self.are_several:
            return shares[0] if shares else None
        received: list[T | None] = [None]
        dist.scatter_object_list(received, list(shares) if self.is_first and shares else None, src=0)
        return received[0]

    def gather(self, value: T) -> list[T] | None:
        """The values of all processes, first to last; None for all processes but the first."""
        if not self.are_several:
            return [value]
        gathered: list[T | None] = [None] * self.count
        dist.gather_object(value, gathered if self.is_first else None, dst=0)
        return [item for item in gathered if item is not None] if self.is_first else None

    def any(self, flag: bool) -> bool:
        return self.sum(float(flag)) > 0

    def wait_for_all(self) -> None:
        if self.are_several:
            dist.barrier()

    def shard(self, model: nn.Module, blocks: Iterable[nn.Module], compute_dtype: torch.dtype) -> None:
        """FSDP2: every block by itself, then the rest; gradients are summed, not averaged."""
        if not self.are_several:
            return
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
        sharded: list[Any] = [fully_shard(block, mp_policy=policy) for block in blocks]
        sharded.append(fully_shard(model, mp_policy=policy))
        for part in sharded:
            # A step's loss is divided by the tokens of all processes already.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo knows plain sums only
        self._sharded = True

    def sum_gradients(self, weights: Sequence[Tensor]) -> None:
        """Where each process has a copy of the model: every gradient becomes the sum of those of all
        processes.

        A weight that had no gradient in one process may have had one in another, whose data used it; one that
        had none anywhere keeps none, so that the optimizer leaves it alone.
        """
        if not self.are_several or self._sharded:
            return
        has = torch.tensor([weight.grad is not None for weight in weights], dtype=torch.float32)
        used = self.largest(has.to(self.device)).tolist()
        gradients = []
        for weight, anywhere in zip(weights, used, strict=True):
            if anywhere:
                weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
                gradients.append(weight.grad)
        for bucket in _buckets(gradients):
            flat = self.sum_all(torch.cat([gradient.flatten() for gradient in bucket]))
            sizes = [gradient.numel() for gradient in bucket]
            for gradient, total in zip(bucket, torch.split(flat, sizes), strict=True):
                gradient.copy_(total.view_as(gradient))

    def close(self) -> None:
        if self.are_several and dist.is_initialized():
            dist.destroy_process_group()

    def _reduced(self, values: Tensor, how: Any) -> Tensor:
        if not self.are_several:
            return values
        total = values.clone()
        dist.all_reduce(total, op=how)
        return total


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor put together; any other as it is."""
    full = getattr(tensor, "full_tensor", None)
    result: Tensor = tensor if full is None else full()
    return result


def _buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Runs of tensors of one type that are large enough to be worth a message."""
    found: list[list[Tensor]] = []
    size = 0
    for tensor in tensors:
        bytes_here = tensor.numel() * tensor.element_size()
        if not found or size + bytes_here > _BUCKET or found[-1][0].dtype is not tensor.dtype:
            found.append([])
            size = 0
        found[-1].append(tensor)
        size += bytes_here
    return found
