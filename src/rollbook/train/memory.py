"""How much memory training needs, worked out before any of it is taken, and how much there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, Self

import psutil
import torch

from rollbook.errors import UsageError
from rollbook.train.model_files import base_of, directory_of, holds_adapters
from rollbook.train.model_settings import LoraSettings, ModelSettings

_DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
MOMENT_BYTES, GRADIENT_BYTES, COPY_BYTES = 8, 4, 4  # for each trained parameter
_ADAPTER_BYTES = 4  # adapters are float32, whatever is below them
_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


class Needs(NamedTuple):
    """Bytes that are held from the first step on."""

    weights: int
    optimizer: int  # moments, float32 copies and gradients

    @property
    def total(self) -> int:
        return self.weights + self.optimizer


def needs_of(settings: ModelSettings) -> Needs | None:
    """What a model and its training hold; None where its config cannot be read, as loading it will say."""
    try:
        model = _empty_model(settings)
    except Exception:  # a directory of anybody's
        return None
    weights = sum(parameter.numel() for parameter in model.parameters()) * _DTYPE_BYTES[settings.dtype]
    if settings.lora is None:
        trained = weights // _DTYPE_BYTES[settings.dtype]
    else:
        trained = _adapter_parameters(model, settings.lora)
        weights += trained * _ADAPTER_BYTES
    return Needs(weights, trained * bytes_per_trained(settings))


def bytes_per_trained(settings: ModelSettings) -> int:
    """What the optimiser holds for each parameter that is trained; float32 ones are their own copy."""
    is_copied = settings.dtype != "float32" and settings.lora is None
    return MOMENT_BYTES + GRADIENT_BYTES + (COPY_BYTES if is_copied else 0)


def refuse_too_large(settings: ModelSettings, device: torch.device, processes: int = 1) -> None:
    """Say that a model does not fit before it is loaded; `processes` on a CPU share its memory."""
    needs, free = needs_of(settings), free_bytes(device)
    copies = processes if device.type == "cpu" else 1
    if needs is None or needs.total * copies <= free:
        return
    each = f"{copies} processes, each with " if copies > 1 else ""
    lora = "" if settings.lora is not None else ", or set model.lora"
    raise UsageError(
        f"not enough memory: {each}{gib(needs.weights)} of weights, {gib(needs.optimizer)} for the optimiser "
        f"and its gradients, and {gib(free)} are free; take a smaller model{lora}"
    )


def cache_bytes(config: Any, dtype: torch.dtype, tokens: int) -> int | None:
    """Keys and values of so many tokens; None for a family that says otherwise how wide they are."""
    try:
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return int(tokens * config.num_hidden_layers * 2 * heads * width * dtype.itemsize)
    except (AttributeError, TypeError):
        return None


def free_bytes(device: torch.device) -> int:
    """What can be taken now without swapping."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free, inside = psutil.virtual_memory().available, _left_in_cgroup()
    return free if inside is None else min(free, inside)


class Peak:
    """The most memory that a block takes on top of what was held before; None where nobody counts it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.bytes: int | None = None

    def __enter__(self) -> Self:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before: int | None = torch.cuda.memory_allocated(self._device)
        else:
            self._before = psutil.Process().memory_info().rss if _forget_peak() else None
        return self

    def __exit__(self, *_: object) -> None:
        on_gpu = self._device.type == "cuda"
        most = torch.cuda.max_memory_allocated(self._device) if on_gpu else _most_held()
        if self._before is not None and most is not None:
            self.bytes = max(0, most - self._before)


def gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:,.1f} MiB"


def _empty_model(settings: ModelSettings) -> Any:
    """The model without memory for its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    directory = directory_of(settings)
    if directory is None:
        given = dict(settings.config or {})
        config = AutoConfig.for_model(given.pop("model_type"), **given)
    else:
        directory = base_of(directory) if holds_adapters(directory) else directory
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    build: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        return build(config)


def _adapter_parameters(model: Any, lora: LoraSettings) -> int:
    head = model.get_output_embeddings()
    layers = (
        module for module in model.modules() if isinstance(module, torch.nn.Linear) and module is not head
    )
    return sum(lora.rank * (layer.in_features + layer.out_features) for layer in layers)


def _most_held() -> int | None:
    """The most memory that this process held, which psutil does not know."""
    try:
        lines = (_PROC / "self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")), None)


def _forget_peak() -> bool:
    """Let the kernel begin to count the peak of this process anew."""
    try:
        (_PROC / "self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _left_in_cgroup() -> int | None:
    """What a container may still take; its file cache is given back when it is wanted."""
    try:
        inside = (_PROC / "self/cgroup").read_text().splitlines()[0].split("::", 1)[-1].lstrip("/")
    except (OSError, IndexError):
        return None
    for directory in (_CGROUPS / inside, _CGROUPS):
        try:
            most = int((directory / "memory.max").read_text())
            used = int((directory / "memory.current").read_text())
            stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # no limit, or another version of cgroups
            continue
        return max(0, most - used + int(stat.get("file", 0)))
    return None
