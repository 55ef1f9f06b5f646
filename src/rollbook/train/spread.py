"""Gives every process of a job the model that the first one has read.

Files of weights are opened by the first process alone, into the memory of its host. The others are sent its
modules without the weights, so that adapters, tied embeddings, buffers and all that loading decided are the
same everywhere. Then the weights follow, part by part: whole where each process has a copy of the model, its
own share where the model is sharded. So no GPU ever holds more of a sharded model than its share and a part.

    model = load_once(processes, lambda: load_model(settings, ...))
    spread(model, processes, probes, sharded=torch.bfloat16, log=log)   # the checks, then the weights
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rollbook.errors import RollbookError
from rollbook.train.batch import Example
from rollbook.train.checks import check_packing_and_head, compare_logprobs, probe_logprobs
from rollbook.train.machine import all_cores
from rollbook.train.model import Model
from rollbook.train.processes import Processes


def load_once(processes: Processes, load: Callable[[], Model]) -> Model:
    """The model that `load` reads in the first process; for the others the same without weights.

    Where it cannot be read, all processes end.
    """
    model = modules = None
    with processes.together():
        if processes.is_first:
            model = load()
            modules = _without_weights(model) if processes.are_several else None
    if model is None:
        model = _rebuilt(processes.share())
    elif processes.are_several:
        processes.share(modules)
    return model


def spread(
    model: Model,
    processes: Processes,
    probes: Sequence[Example],
    *,
    sharded: torch.dtype | None = None,
    packing: Literal["auto", "on", "off"] = "auto",
    log: Callable[[str], None],
) -> None:
    """Check the weights where they are, give them to all processes, and check that all compute the same.

    `sharded` is the type to compute in where several processes share one model; None: each has a copy.
    """
    expected_N = torch.empty(0)
    shards = sharded is not None and processes.are_several
    with processes.together():
        if processes.is_first:
            if not shards:
                model.model.to(processes.device)
            with all_cores(model.device):
                check_packing_and_head(model, probes, model.device, packing=packing, log=log)
                expected_N = probe_logprobs(model, probes) if processes.are_several else expected_N
    if not processes.are_several:
        return
    packs, model.chunks_head, expected_N = processes.share((model.packs, model.chunks_head, expected_N))
    model.use_packing(packs)
    if sharded is not None:
        _shard(model, processes, sharded)
    else:
        _send_weights(model.model, processes)
        model.model.to(processes.device)  # the buffers
    found_N = probe_logprobs(model, probes)
    if processes.is_sharded:
        model.model.reshard()  # else the outermost part stays whole, and that is what an optimiser would take
    with processes.together():
        compare_logprobs(found_N, expected_N, model.dtype, processes.rank)


def _shard(model: Model, processes: Processes, compute_dtype: torch.dtype) -> None:
    """FSDP2: every block by itself, then the rest; gradients are summed, not averaged."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for part in (*model.blocks, model.model):
        _send_weights(part, processes)
        sharded: Any = fully_shard(part, mp_policy=policy)
        # A step's loss is divided by the tokens of all processes already.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo knows plain sums only
    model.dtype = compute_dtype
    processes.is_sharded = True


@torch.no_grad()
def _send_weights(part: nn.Module, processes: Processes) -> None:
    """Put the weights of the first process into this part of all; what is sharded is there already."""
    for parameter in list(part.parameters()):
        if not isinstance(parameter, DTensor):
            whole = nn.Parameter(processes.share_tensor(parameter), parameter.requires_grad)
            swap: Any = torch.utils.swap_tensors
            swap(parameter, whole)  # it stays the same object, in every module that uses it


class _Modules(pickle.Pickler):
    """Writes objects without the values of their weights."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, nn.Parameter):
            return _empty, (value.shape, value.dtype, value.requires_grad)
        return NotImplemented


def _empty(shape: torch.Size, dtype: torch.dtype, requires_grad: bool) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad)


def _without_weights(model: Model) -> bytes:
    file = io.BytesIO()
    try:
        _Modules(file).dump(model)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise RollbookError(
            f"model: a {type(model.base).__name__} cannot be sent to other processes ({error}); "
            "set processes: 1"
        ) from error
    return file.getvalue()


def _rebuilt(modules: bytes) -> Model:
    """The model again. The bytes come from this job's first process and never from a file."""
    model: Model = pickle.loads(modules)
    return model
