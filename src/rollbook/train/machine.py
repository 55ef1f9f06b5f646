"""What is chosen for the machine where the settings leave it open. A run decides once and keeps it."""

from __future__ import annotations

import torch

# Below this many parameters a matrix product is so short that threads wait for each other.
_SMALL_MODEL = 20_000_000
# On a CPU a micro-batch that stays in the cache trains up to twice as fast as a large one.
_CPU_TOKENS, _GPU_TOKENS = 768, 16_384


def choose_threads(parameters: int, device: torch.device) -> int:
    """How many threads a process computes with: one for a small model on a CPU, else torch's own choice."""
    if device.type == "cpu" and parameters < _SMALL_MODEL:
        return 1
    return torch.get_num_threads()


def choose_micro_batch_tokens(device: torch.device) -> int:
    """How many tokens go through the model at once when it is trained."""
    return _CPU_TOKENS if device.type == "cpu" else _GPU_TOKENS
