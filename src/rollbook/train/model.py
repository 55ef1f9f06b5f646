"""The model of a run: loaded, handed over or built with random weights; full or with adapters; ready to step.

What a batch gives is the log-probability of each trained token; logits are never held (`losses.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rollbook.errors import UsageError
from rollbook.train.attention import PACKED, register_packed_attention
from rollbook.train.losses import token_logprobs
from rollbook.train.packing import Batch
from rollbook.train.settings import LoraSettings, ModelSettings

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class TrainedModel:
    """A causal language model with its tokenizer, and how to run a batch through it."""

    def __init__(self, model: Any, tokenizer: Any, *, is_adapter: bool = False) -> None:
        self.model = model  # what is saved: a PreTrainedModel, or a PeftModel around one
        self.tokenizer = tokenizer
        self.is_adapter = is_adapter
        self.base = model.get_base_model() if is_adapter else model
        self.packs = False
        self._replays = False
        self._own_attention = self.base.config._attn_implementation
        # Whether the log-probabilities are what a softmax over the plain product with the head gives; a model
        # that caps or scales its logits, or adds a bias, is run with its own logits (see `selftests.py`).
        self.chunks_head = getattr(self.base.get_output_embeddings(), "bias", None) is None

    def use_packing(self, on: bool) -> None:
        """Attention that keeps packed sequences apart, or the model's own for padded rows."""
        register_packed_attention()
        self.base.set_attn_implementation(PACKED if on else self._own_attention)
        self.packs = on

    def logprobs(self, batch: Batch) -> Tensor:
        """The log-probability of every trained token of the batch, in float32."""
        if not self.chunks_head:
            logits = self._forward(batch).flatten(0, 1)[batch.rows].float()
            return logits.log_softmax(-1).gather(1, batch.targets[:, None]).squeeze(1)
        head = self.base.get_output_embeddings()

        def chosen(hidden: Tensor) -> Tensor:
            rows = hidden.flatten(0, 1).index_select(0, batch.rows)
            return token_logprobs(rows, head.weight, batch.targets)

        # In the place of the head's own forward: there a sharded weight is whole, as it must be.
        head.forward = chosen
        try:
            return self._forward(batch)
        finally:
            del head.forward

    def _forward(self, batch: Batch) -> Tensor:
        kept_apart: dict[str, Any] = (
            {"attention_mask": batch.attention_mask}
            if batch.boundaries is None
            else {"boundaries": batch.boundaries, "longest": batch.longest}
        )
        if self._replays:
            mark: Any = torch.compiler.cudagraph_mark_step_begin
            mark()  # what the last pass left may be overwritten now
        output = self.model(
            input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, **kept_apart
        )
        logits: Tensor = output.logits
        return logits

    def stop_at(self, tokens: set[int]) -> list[int]:
        """Whoever generates shall stop at these, the ends of the replies; returns those it did not yet."""
        config = self.base.generation_config
        ends = _as_list(config.eos_token_id)
        added = sorted(tokens - set(ends))
        if added:
            config.eos_token_id = [*ends, *added]
        return added

    @property
    def head_dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.base.get_output_embeddings().weight.dtype
        return dtype

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

    def compile_blocks(self, *, replayed: bool) -> None:
        """One graph for all blocks, so the warm-up is short.

        `replayed` records the launches of each block once and replays them: a small model is otherwise held
        up by the processor that starts its kernels (half again as fast, measured). Weights must stay where
        they are, and gradients be taken over after each backward pass, before the next one overwrites them.
        """
        self._replays = replayed
        for block in self.blocks:
            block.compile(mode="reduce-overhead" if replayed else "default")


def load_model(
    settings: ModelSettings, *, seed: int, dtype: torch.dtype, checkpoint: Path | None = None
) -> TrainedModel:
    """`dtype` is that of the weights in memory; sharded training keeps them in float32.

    With a checkpoint the weights are its: a whole model, or the adapters over the base of the settings.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    silence: Any = transformers_logging.disable_progress_bar  # a log has no carriage returns
    silence()
    torch.manual_seed(seed)
    if checkpoint is not None and (settings.lora is not None) != _holds_adapters(checkpoint):
        kind = "adapters" if _holds_adapters(checkpoint) else "a whole model"
        raise UsageError(f"{checkpoint} holds {kind}: set model.lora as it was, or start with --overwrite")
    source = checkpoint if checkpoint is not None and settings.lora is None else _source(settings)
    words = checkpoint or settings.tokenizer or source
    try:
        tokenizer = AutoTokenizer.from_pretrained(words)
    except (OSError, ValueError) as error:
        raise UsageError(f"the tokenizer of {words}: {_first_line(error)}") from error
    try:
        if source is None:
            model = _from_config(settings.config or {}, dtype)
        else:
            load: Any = AutoModelForCausalLM.from_pretrained
            model = _merged(source, dtype) if _holds_adapters(source) else load(source, dtype=dtype)
    except (OSError, ValueError) as error:
        raise UsageError(f"model: {source}: {_first_line(error)}") from error
    if settings.chat_template is not None and checkpoint is None:
        tokenizer.chat_template = _template(Path(settings.chat_template))
    _check_vocabulary(model, tokenizer)
    _stop_where_the_tokenizer_does(model, tokenizer)
    model.config.use_cache = False
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if settings.lora is None:
        return TrainedModel(model, tokenizer)
    if checkpoint is not None:
        from peft import PeftModel

        adapted = PeftModel.from_pretrained(model, checkpoint, is_trainable=True)
    else:
        adapted = _with_adapters(model, settings.lora, seed)
    if settings.gradient_checkpointing:
        model.enable_input_require_grads()  # else nothing below the first adapter has a gradient to recompute
    return TrainedModel(adapted, tokenizer, is_adapter=True)


def _source(settings: ModelSettings) -> Path | None:
    if settings.config is not None:
        return None
    if settings.handed_over is not None:
        from rollbook.runs.handoff import resolve_checkpoint

        return Path(resolve_checkpoint(Path(settings.handed_over)))
    path = Path(str(settings.path))
    if not path.is_dir():
        raise UsageError(f"model.path {path}: no such directory")
    return path.absolute()  # adapters name their base, and are read from anywhere


def _holds_adapters(directory: Path) -> bool:
    return (directory / "adapter_config.json").exists()


def _template(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise UsageError(f"model.chat_template {path}: {error.strerror}") from None


def _from_config(values: dict[str, Any], dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    given = dict(values)
    kind = given.pop("model_type", None)
    if kind is None:
        raise UsageError("model.config.model_type is missing; write llama, qwen3, ...")
    build: Any = AutoModelForCausalLM.from_config
    try:
        return build(AutoConfig.for_model(kind, **given), dtype=dtype)
    except Exception as error:  # every family checks its sizes in its own way
        raise UsageError(f"model.config: {kind}: {str(error).strip().splitlines()[-1].strip()}") from error


def _merged(source: Path, dtype: torch.dtype) -> Any:
    """Adapters put into their base model: what is trained next stands on both."""
    from peft import AutoPeftModelForCausalLM

    return AutoPeftModelForCausalLM.from_pretrained(source, dtype=dtype).merge_and_unload()


def _with_adapters(model: Any, lora: LoraSettings, seed: int) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    alpha: Any = 2 * lora.rank if lora.alpha is None else lora.alpha  # a number; peft says int
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=alpha,
        lora_dropout=lora.dropout,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        raise UsageError(f"model.lora: {_first_line(error)}") from error


def _check_vocabulary(model: Any, tokenizer: Any) -> None:
    size = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > size:
        raise UsageError(
            f"the tokenizer has {len(tokenizer)} tokens and the model {size}; they do not belong together"
        )


def _stop_where_the_tokenizer_does(model: Any, tokenizer: Any) -> None:
    """A model that learns to end its turns must also be stopped there by whoever generates with it."""
    end = tokenizer.eos_token_id
    if end is None:
        return
    for config in (model.config, model.generation_config):
        ends = _as_list(getattr(config, "eos_token_id", None))
        if end not in ends:
            # Of another vocabulary (a config's default) unless it is one of the tokenizer's own specials.
            kept = [other for other in ends if other in tokenizer.all_special_ids]
            config.eos_token_id = [*kept, end] if kept else end
        if getattr(config, "pad_token_id", None) is None and tokenizer.pad_token_id is not None:
            config.pad_token_id = tokenizer.pad_token_id


def _as_list(tokens: Any) -> list[int]:
    return [] if tokens is None else [*tokens] if isinstance(tokens, list) else [tokens]


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
