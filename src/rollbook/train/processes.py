"""One process or several: who am I, and what do all of us together have?

Started by torchrun there are several. The model is then sharded over them by FSDP2, or each has a copy of
it and gradients are added up; otherwise there is one and every question here has the simple answer. The
code of a job asks and never branches.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rollbook.errors import OtherProcessError

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
        self.is_sharded = False  # whether each has a share of the model, not a copy
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

    def share(self, value: T | None = None) -> T:
        """The value of the first process, on all of them; the others pass nothing."""
        received: list[Any] = [value]
        if self.are_several:
            dist.broadcast_object_list(received, src=0)
        shared: T = received[0]
        return shared

    def share_tensor(self, tensor: Tensor) -> Tensor:
        """The bits that the first process has in a tensor, on the device of each.

        The others pass one of the same shape and type, on the meta device perhaps.
        """
        if not self.are_several:
            return tensor.to(self.device)
        if self.is_first:
            whole = tensor.detach().to(self.device).contiguous()
        else:
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        dist.broadcast(whole.view(-1).view(torch.uint8), src=0)  # gloo does not know every type
        return whole

    @contextmanager
    def together(self) -> Iterator[None]:
        """All processes leave the block or none: an error of one of them ends the others too.

        Only the first that failed raises its error, so there is one message. No process may wait for
        another one inside.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        has_failed = torch.zeros(self.count, dtype=torch.float64, device=self.device)
        has_failed[self.rank] = float(error is not None)
        failed = self.sum_all(has_failed).nonzero().flatten().tolist()
        if failed and (error is None or failed[0] != self.rank):
            raise OtherProcessError(failed[0])
        if error is not None:
            raise error

    def any(self, flag: bool) -> bool:
        return self.sum(float(flag)) > 0

    def sum_gradients(self, weights: Sequence[Tensor]) -> None:
        """Where each process has a copy of the model: every gradient becomes the sum of those of all
        processes.

        A weight that had no gradient in one process may have had one in another, whose data used it; one that
        had none anywhere keeps none, so that the optimizer leaves it alone.
        """
        if not self.are_several or self.is_sharded:
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
