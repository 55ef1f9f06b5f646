"""One process or several: who am I, and what do all of us together have?

Started by torchrun there are several, and the model is sharded over them by FSDP2; otherwise there is one and
every question here has the simple answer. The code of a job asks and never branches.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


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
        if self.are_several and not dist.is_initialized():
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")

    @property
    def are_several(self) -> bool:
        return self.count > 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, value: float) -> float:
        """The sum over all processes."""
        if not self.are_several:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return float(total)

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

    def close(self) -> None:
        if self.are_several and dist.is_initialized():
            dist.destroy_process_group()


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor put together; any other as it is."""
    full = getattr(tensor, "full_tensor", None)
    result: Tensor = tensor if full is None else full()
    return result
