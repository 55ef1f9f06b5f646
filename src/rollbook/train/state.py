"""What a model in training consists of, to and from a directory: the same for every job.

| file | what |
|---|---|
| `model.safetensors` (or the adapters), `config.json`, tokenizer files | as `from_pretrained` reads them |
| `optimizer.safetensors` | Adam's moments and steps, and the float32 copies of weights in a lower precision |
| `random_state.json`, of a sharded model `random_state_<rank>.json` for each process | of every generator |
| `training_state.json` | what the job adds: plain JSON |

Nothing here is a pickle, so loading runs no code of whoever wrote the files. Equal states give equal bytes,
and loading gives back every bit. Whole tensors are written, in the form that one process gives them, however
they were sharded: any number of processes can continue from them. The caller makes the directory complete or
absent (`records/complete.py`).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from rollbook.errors import BadFileError, UsageError, WriteError
from rollbook.records.complete import file_facts
from rollbook.records.identity import derive_seed
from rollbook.runs.random_state import encode_random_state, read_random_state, seed_generators
from rollbook.train.model import Model
from rollbook.train.optimizer import Optimizer
from rollbook.train.processes import Processes, whole

OPTIMIZER, EXTRA = "optimizer.safetensors", "training_state.json"
_PICKLE = "optimizer.pt"


def save_training_state(
    directory: Path,
    model: Model,
    optimizer: Optimizer,
    extra: Mapping[str, Any] | None = None,
    processes: Processes | None = None,
) -> None:
    """Write everything into a directory that exists; `extra` is the first process's.

    All `processes` call it where the model is sharded. Of copies that are all equal, the first process calls
    it alone.
    """
    weights, kept = None, _whole_tensors(_named(model, optimizer))
    if _is_sharded(model):
        weights = _whole_weights(model)
        kept |= _float32_copies(model, weights)
        _as_one_process_has_them(model, weights)
    with processes.together() if processes is not None else nullcontext():
        try:
            (directory / _random_name(model)).write_bytes(encode_random_state())
            if _rank() == 0:
                _write(directory, model, weights, kept, extra or {})
        except (OSError, SafetensorError) as error:
            free = shutil.disk_usage(directory).free
            raise WriteError(
                f"the checkpoint could not be written to {directory} ({error}), with {free:,} bytes left on "
                "the disk. Those before it are complete; make room, then continue with --resume"
            ) from error
    if _rank() == 0:
        _give_modes_of_umask(directory)


def _write(
    directory: Path,
    model: Model,
    weights: Mapping[str, Tensor] | None,
    kept: dict[str, Tensor],
    extra: Mapping[str, Any],
) -> None:
    model.model.save_pretrained(directory, state_dict=weights)
    model.tokenizer.save_pretrained(directory)
    if weights is not None:
        _note_dtype(directory / "config.json", model.dtype)
    _sort_adapter_config(directory / "adapter_config.json")
    save_file(kept, directory / OPTIMIZER)
    text = json.dumps(extra, sort_keys=True, indent=2, allow_nan=False)
    (directory / EXTRA).write_text(f"{text}\n")


def load_training_state(
    directory: Path, model: Model, optimizer: Optimizer, processes: Processes | None = None
) -> dict[str, Any]:
    """Put back optimiser and random states, and return `extra`.

    The weights and the tokenizer are already there: `load_model(..., checkpoint=directory)` reads them. The
    first process reads the tensors for all.
    """
    processes = processes or Processes()
    with processes.together():
        extra = read_extra(directory)
        _restore_random_state(directory, model, processes)
    with ExitStack() as opened:
        stored = None
        with processes.together():
            if processes.is_first:
                stored = _open_stored(opened, directory / OPTIMIZER, model, optimizer)
        optimizer.restore(_shared(stored, processes))
    return extra


def weights_digest(model: Model) -> str:
    """32 hex digits for every trained weight, as the model computes with it."""
    digest = xxhash.xxh3_128()
    trained = {name: weight for name, weight in model.model.named_parameters() if weight.requires_grad}
    copies = {name: weight.detach().to("cpu", non_blocking=True) for name, weight in trained.items()}
    if any(weight.is_cuda for weight in trained.values()):
        torch.cuda.synchronize()  # all copies were under way at once
    for name, copy in copies.items():
        _add(digest, name, copy)
    return digest.hexdigest()


def frozen_digest(model: Model) -> str | None:
    """The same for the weights that are not trained, one after another; None where all are."""
    frozen = [(name, weight) for name, weight in model.model.named_parameters() if not weight.requires_grad]
    digest = xxhash.xxh3_128()
    for name, weight in frozen:
        _add(digest, name, weight.detach().cpu())
    return digest.hexdigest() if frozen else None


def _add(digest: xxhash.xxh3_128, name: str, on_host: Tensor) -> None:
    digest.update(name.encode())
    digest.update(on_host.contiguous().flatten().view(torch.uint8).numpy().data)


def read_extra(directory: Path) -> dict[str, Any]:
    """What the job added when it saved, without loading anything."""
    if (directory / _PICKLE).exists():
        raise UsageError(
            f"{directory} cannot be resumed: {_PICKLE}, of another trainer or an older version, is a pickle, "
            f"which could run code. Its weights can be trained further: model.path: {directory} with another "
            "output directory"
        )
    return _read_json(directory / EXTRA)


def _restore_random_state(directory: Path, model: Model, processes: Processes) -> None:
    """Each process gets its own again; if another number of processes saved, new ones made from the first."""
    saved = sorted(directory.glob("random_state*.json"))
    if not saved:
        raise BadFileError(directory, "has no random_state.json, so it cannot be resumed")
    if len(saved) == (processes.count if _is_sharded(model) else 1):
        read_random_state(directory / _random_name(model))
    else:
        seed_generators(derive_seed(file_facts(saved[0]).xxh3_128, processes.rank, processes.count))


_Stored = Mapping[str, Tensor]  # by the names that the optimiser gives them


def _open_stored(opened: ExitStack, path: Path, model: Model, optimizer: Optimizer) -> list[_Stored]:
    """What is stored for each parameter; the tensors are read from the disk when they are looked at."""
    names = _names(model)
    try:
        file = opened.enter_context(safe_open(path, framework="pt"))
        stored: dict[str, dict[str, Tensor]] = {name: {} for name in names}
        for key in file.keys():  # noqa: SIM118 - it is not a mapping
            slot, _, name = key.partition(".")
            if name not in stored:
                raise BadFileError(path, f"{name} is not a trained parameter of this model")
            stored[name][slot] = file.get_tensor(key)
        optimizer.check([stored[name] for name in names])
    except (OSError, SafetensorError, ValueError) as error:
        raise BadFileError(path, str(error)) from None
    return [stored[name] for name in names]


def _shared(stored: Sequence[_Stored] | None, processes: Processes) -> Iterator[_Stored]:
    """What the first process has opened, whole on each, for one parameter after the other."""
    plan = None if stored is None else [_map(tensors, _without_values) for tensors in stored]
    for number, tensors in enumerate(processes.share(plan)):
        yield _map(tensors if stored is None else stored[number], processes.share_tensor)


def _map(tensors: _Stored, change: Callable[[Tensor], Tensor]) -> _Stored:
    return {name: change(tensor) for name, tensor in tensors.items()}


def _without_values(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _named(model: Model, optimizer: Optimizer) -> Iterable[tuple[str, Tensor]]:
    for name, tensors in zip(_names(model), optimizer.tensors(), strict=True):
        for slot, tensor in tensors.items():
            yield f"{slot}.{name}", tensor


def _names(model: Model) -> list[str]:
    return [name for name, parameter in model.model.named_parameters() if parameter.requires_grad]


def _whole_tensors(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Put together on all processes in the same order, kept by the first one, in the host's memory."""
    kept = {}
    for name, tensor in named:
        full = whole(tensor)
        if _rank() == 0:
            kept[name] = full.detach().cpu().contiguous()
    return kept


def _is_sharded(model: Model) -> bool:
    return any(hasattr(parameter, "full_tensor") for parameter in model.model.parameters())


def _whole_weights(model: Model) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights: dict[str, Any] = get_model_state_dict(model.model, options=options)
    return weights


def _float32_copies(model: Model, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the optimiser of one process keeps beside weights of a lower precision; adapters are float32."""
    if model.dtype is torch.float32 or model.is_adapter or not weights:
        return {}
    return {f"copy.{name}": weights[name] for name in _names(model)}


def _as_one_process_has_them(model: Model, weights: dict[str, Tensor]) -> None:
    """In the precision of the model, and as one tensor where several modules share one."""
    dtype = torch.float32 if model.is_adapter else model.dtype
    made: dict[nn.Parameter, Tensor] = {}
    for name, parameter in model.model.named_parameters(remove_duplicate=False):
        if name in weights:  # the first process has them
            weights[name] = made.setdefault(parameter, weights[name].to(dtype))


def _note_dtype(path: Path, dtype: torch.dtype) -> None:
    """Let a config.json say what type the weights beside it have, where it says that of a sharded model."""
    if path.exists():
        config = json.loads(path.read_text()) | {"dtype": str(dtype).removeprefix("torch.")}
        path.write_text(json.dumps(config, indent=2) + "\n")


def _sort_adapter_config(path: Path) -> None:
    """peft writes sets in the order of their hashes, which is another in every process."""
    if path.exists():
        config = json.loads(path.read_text())
        ordered = {key: sorted(value) if _is_set_of_names(value) else value for key, value in config.items()}
        path.write_text(json.dumps(ordered, sort_keys=True, indent=2) + "\n")


def _is_set_of_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise BadFileError(path, "is missing, so this checkpoint cannot be resumed") from None
    except ValueError as error:
        raise BadFileError(path, str(error)) from None
    if not isinstance(value, dict):
        raise BadFileError(path, f"is a {type(value).__name__}, not an object")
    return value


def _give_modes_of_umask(directory: Path) -> None:
    """Some writers leave files for their owner alone, and the next stage may run as somebody else."""
    mask = os.umask(0)
    os.umask(mask)
    for path in directory.rglob("*"):
        if path.is_file():
            path.chmod(0o666 & ~mask)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _random_name(model: Model) -> str:
    return f"random_state_{_rank()}.json" if _is_sharded(model) else "random_state.json"
