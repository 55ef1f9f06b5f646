"""What is chosen for the machine where the settings leave it open, and what the machine is.

A run decides once and keeps it.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

import torch

from rollbook.runs.jobs.system import cpu_facts
from rollbook.version import __version__

# Below this many parameters a matrix product is so short that threads wait for each other.
_SMALL_MODEL = 20_000_000
# On a CPU a micro-batch that stays in the cache trains up to twice as fast as a large one.
_CPU_TOKENS, _GPU_TOKENS = 768, 16_384

_PACKAGES = ("torch", "transformers", "peft")  # whose code runs in a step


def choose_threads(parameters: int, device: torch.device) -> int:
    """How many threads a process computes with: one for a small model on a CPU, else torch's own choice."""
    if device.type == "cpu" and parameters < _SMALL_MODEL:
        return 1
    return torch.get_num_threads()


@contextmanager
def all_cores(device: torch.device) -> Iterator[None]:
    """For large work on the host of GPUs: torchrun gives each process one thread, and the others wait."""
    before = torch.get_num_threads()
    if device.type == "cpu" and torch.cuda.is_available():
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def choose_micro_batch_tokens(device: torch.device) -> int:
    """How many tokens go through the model at once when it is trained."""
    return _CPU_TOKENS if device.type == "cpu" else _GPU_TOKENS


def describe_machine(device: torch.device) -> str:
    """Everything that decides the last bit of a sum: where it says the same, the same is computed."""
    if device.type == "cuda":
        place = torch.cuda.get_device_name(device)
    else:
        place = f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}"
    packages = ", ".join(f"{name} {metadata.version(name)}" for name in _PACKAGES)
    threads = torch.get_num_threads()
    return f"{place}, {threads} thread{'s' * (threads > 1)}, {packages}, rollbook {__version__}"


def _processor() -> str:
    """Its name with family, model and stepping, which kernels are chosen by."""
    facts = cpu_facts()
    if "model name" not in facts:
        return platform.processor() or platform.machine()
    numbers = [facts.get(key, "?") for key in ("cpu family", "model", "stepping")]
    return f"{facts['model name']} ({'-'.join(numbers)})"
