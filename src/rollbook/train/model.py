"""A causal language model as the trainer runs it: a batch in, log-probability and entropy of each trained
token out.

Logits of a batch are never held (`token_math.py`), unless the model makes them in a way of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rollbook.train.attention import ATTENTION, register_attention
from rollbook.train.batch import Batch, Example, Forward, Shape, pack, pad
from rollbook.train.token_math import TokenOutputs, head_outputs, logit_outputs


class Model:
    """A model with its tokenizer, and how to run a batch through it."""

    def __init__(self, model: Any, tokenizer: Any, *, is_adapter: bool = False) -> None:
        self.model = model  # what is saved: a PreTrainedModel, or a PeftModel around one
        self.tokenizer = tokenizer
        self.is_adapter = is_adapter
        self.base = model.get_base_model() if is_adapter else model
        self.dtype = self.head_dtype  # that it computes in, and is saved in, whatever shards of it have
        self.packs = False
        self._uses_cuda_graphs = False
        self._own_attention = self.base.config._attn_implementation
        # Whether the logits are the plain product with the head. A model that caps or scales them, or adds a
        # bias, makes them itself (see `checks.py`).
        self.chunks_head = getattr(self.base.get_output_embeddings(), "bias", None) is None

    def use_packing(self, on: bool) -> None:
        """Attention that keeps packed sequences apart, or the model's own for padded rows."""
        register_attention()
        self.base.set_attn_implementation(ATTENTION if on else self._own_attention)
        self.packs = on

    def use_dropout(self, on: bool) -> None:
        """Training mode or not. Without dropout, blocks that are to be computed again in the backward pass
        still are."""
        if self.model.training == on:
            return
        self.model.train(on)
        for block in self.blocks:
            if not on and getattr(block, "gradient_checkpointing", False):
                block.training = True  # of this module alone; the layers in it stay as they are

    def recompute_blocks(self) -> None:
        """Keep no activations inside the blocks: the backward pass computes them again."""
        self.base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if self.is_adapter:  # else nothing below the first adapter has a gradient to recompute
            self.base.enable_input_require_grads()

    def batches(self, examples: list[Example], capacity: int, *, shape: Shape | None = None) -> list[Batch]:
        """The examples as micro-batches of at most `capacity` tokens, packed if this model can do that."""
        if self.packs:
            return pack(examples, capacity, shape=shape, pad_token=self.pad_token)
        return pad(examples, capacity, pad_token=self.pad_token)

    def outputs(self, batch: Batch, *, entropy: bool = False) -> TokenOutputs:
        """One value per trained token, float32, of the distribution at the temperature of the token."""
        head = self.base.get_output_embeddings()
        own_forward = head.forward
        temperature_N = batch.columns_N.get("temperature")
        entropies: list[Tensor | None] = []

        def trained_rows(hidden: Tensor) -> Tensor:
            hidden_NH = hidden.flatten(0, 1).index_select(0, batch.row_N)
            if not self.chunks_head:
                logits: Tensor = own_forward(hidden_NH)
                return logits[None]
            outputs = head_outputs(
                hidden_NH, head.weight, batch.target_N, temperature_N=temperature_N, entropy=entropy
            )
            entropies.append(outputs.entropy_N)
            return outputs.logprob_N

        # In the place of the head's own forward: there a sharded weight is whole, as it must be.
        head.forward = trained_rows
        try:
            output = self._forward(batch.forward)
        finally:
            del head.forward
        if entropies:
            return TokenOutputs(output, entropies[0])
        return logit_outputs(output[0], batch.target_N, temperature_N=temperature_N, entropy=entropy)

    def _forward(self, forward: Forward) -> Tensor:
        kept_apart: dict[str, Any] = (
            {"attention_mask": forward.attention_mask}
            if forward.boundaries is None
            else {"boundaries": forward.boundaries, "longest": forward.longest}
        )
        if self._uses_cuda_graphs:
            mark: Any = torch.compiler.cudagraph_mark_step_begin
            mark()  # what the last pass left may be overwritten now
        output = self.model(
            input_ids=forward.input_ids, position_ids=forward.position_ids, use_cache=False, **kept_apart
        )
        logits: Tensor = output.logits
        return logits

    def add_eos_tokens(self, tokens: set[int]) -> list[int]:
        """Adds these token ids to generation_config.eos_token_id and returns the new ones."""
        config = self.base.generation_config
        ends = as_list(config.eos_token_id)
        added = sorted(tokens - set(ends))
        if added:
            config.eos_token_id = [*ends, *added]
        return added

    @property
    def pad_token(self) -> int:
        return int(
            getattr(self.tokenizer, "pad_token_id", None)
            or getattr(self.tokenizer, "eos_token_id", None)
            or 0
        )

    @property
    def vocabulary(self) -> int:
        """How many tokens it gives a probability to, which can be more than the tokenizer has."""
        size: int = self.base.get_output_embeddings().weight.shape[0]
        return size

    @property
    def head_dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.base.get_output_embeddings().weight.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.model.parameters()).device
        return device

    @property
    def positions(self) -> int | None:
        """How long a sequence may be by the model's config, where that says so."""
        most: int | None = getattr(self.base.config.get_text_config(), "max_position_embeddings", None)
        return most

    @property
    def blocks(self) -> list[nn.Module]:
        """The repeated layers, for sharding and compiling one at a time."""
        return list(getattr(self.base.get_decoder(), "layers", []))

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def count(self) -> tuple[int, int]:
        """All parameters, and those that are trained."""
        return sum(p.numel() for p in self.model.parameters()), sum(p.numel() for p in self.parameters())

    def compile_blocks(self, *, cuda_graphs: bool) -> None:
        """One graph for all blocks, so the warm-up is short.

        `cuda_graphs` records the launches of each block once and replays them: a small model is otherwise
        held up by the processor that starts its kernels (half again as fast, measured). Weights must stay
        where they are, and gradients be taken over after each backward pass, before the next one overwrites
        them.
        """
        self._uses_cuda_graphs = cuda_graphs
        for block in self.blocks:
            block.compile(mode="reduce-overhead" if cuda_graphs else "default")


def as_list(tokens: Any) -> list[int]:
    return [] if tokens is None else [*tokens] if isinstance(tokens, list) else [tokens]
