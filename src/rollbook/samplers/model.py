"""The trainer's own model, run as a sampler needs it: same weights, no copy, nothing left changed.

While it samples, the model is in evaluation mode and takes its attention from `train/attention.py`; both are
put back when the last request is done. If the trainer steps meanwhile, that is found out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rollbook.samplers.slots import Slots
from rollbook.train.attention import ATTENTION, register_attention


class SampledModel:
    """A causal language model whose attention looks into `slots`."""

    def __init__(self, model: Any, slots: Slots) -> None:
        self.model, self.slots = model, slots
        self._decoder = model.get_decoder()
        self._attentions = [module for module in model.modules() if hasattr(module, "layer_idx")]
        self._writes: list[int] | None = None
        register_attention()

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @property
    def vocabulary(self) -> int:
        size: int = self.model.get_output_embeddings().weight.shape[0]
        return size

    @property
    def blocks(self) -> list[Any]:
        """The repeated layers."""
        return list(getattr(self._decoder, "layers", []))

    def logits(self, token_S1: Tensor, position_S1: Tensor) -> Tensor:
        """One token per slot, to S x V; `slots.decode` has been called."""
        output = self.model(input_ids=token_S1, position_ids=position_S1, use_cache=False)
        logits: Tensor = output.logits[:, -1]
        return logits

    def prefill(self, slot: int, token_ids: tuple[int, ...]) -> None:
        """Compute the keys and values of a prompt into a slot; alone, so they depend on nothing else."""
        self.slots.fill(slot)
        ids = torch.tensor([token_ids], device=self.device)
        places = torch.arange(len(token_ids), device=self.device)[None]
        self._decoder(input_ids=ids, position_ids=places, use_cache=False)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        model = self.model
        self._check_writes()
        attention = model.config._attn_implementation
        training = [module for module in model.modules() if module.training]  # can differ from block to block
        if attention != ATTENTION:
            model.set_attn_implementation(ATTENTION)
        if training:
            model.eval()
        for module in self._attentions:
            module.slots = self.slots.layer(module.layer_idx)
        try:
            yield
        finally:
            for module in self._attentions:
                del module.slots
            for module in training:
                module.training = True
            if attention != ATTENTION:
                model.set_attn_implementation(attention)
        self._check_writes()

    def forget(self) -> None:
        """From now on the weights are others."""
        self._writes = None

    def _check_writes(self) -> None:
        writes = [weight._version for weight in self.model.parameters()]  # counts changes in place
        if self._writes is None:
            self._writes = writes
        if self._writes != writes:
            raise RuntimeError(
                "the weights have changed; call update() after every step, and never while sampling"
            )
