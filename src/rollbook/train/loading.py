"""Where a model comes from: a directory, a handed-over result, the hub, or random weights from a config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rollbook.errors import UsageError
from rollbook.train.model import Model, as_list
from rollbook.train.model_settings import LoraSettings, ModelSettings

_ALIGNMENT = 64  # bytes; what torch gives a new tensor on a CPU
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def load_model(
    settings: ModelSettings, *, seed: int, dtype: torch.dtype, checkpoint: Path | None = None
) -> Model:
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
        tokenizer = AutoTokenizer.from_pretrained(words, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UsageError(f"the tokenizer of {words}: {_first_line(error)}") from error
    try:
        if source is None:
            model = _from_config(settings.config or {}, dtype)
        else:
            load: Any = AutoModelForCausalLM.from_pretrained
            options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": False}  # no code, and no question
            model = _merged(source, dtype) if _holds_adapters(source) else load(source, **options)
    except (OSError, ValueError) as error:
        raise UsageError(f"model: {source}: {_first_line(error)}") from error
    if settings.chat_template is not None and checkpoint is None:
        tokenizer.chat_template = read_template(Path(settings.chat_template))
    _check_vocabulary(model, tokenizer)
    _stop_where_the_tokenizer_does(model, tokenizer)
    model.config.use_cache = False
    _train_every_token(model)
    _align(model)
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if settings.lora is None:
        return Model(model, tokenizer)
    if checkpoint is not None:
        from peft import PeftModel

        adapted = PeftModel.from_pretrained(model, checkpoint, is_trainable=True)
    else:
        adapted = _with_adapters(model, settings.lora, seed)
    if settings.gradient_checkpointing:
        model.enable_input_require_grads()  # else nothing below the first adapter has a gradient to recompute
    return Model(adapted, tokenizer, is_adapter=True)


def _source(settings: ModelSettings) -> Path | None:
    if settings.config is not None:
        return None
    if settings.path is None and settings.handed_over is not None:
        from rollbook.runs.handoff import resolve_checkpoint

        return Path(resolve_checkpoint(Path(settings.handed_over)))
    path = Path(str(settings.path))
    if not path.is_dir():
        raise UsageError(f"model.path {path}: no such directory")
    return path.absolute()  # adapters name their base, and are read from anywhere


def _holds_adapters(directory: Path) -> bool:
    return (directory / "adapter_config.json").exists()


def read_template(path: Path) -> str:
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
        ends = as_list(getattr(config, "eos_token_id", None))
        if end not in ends:
            # Of another vocabulary (a config's default) unless it is one of the tokenizer's own specials.
            kept = [other for other in ends if other in tokenizer.all_special_ids]
            config.eos_token_id = [*kept, end] if kept else end
        if getattr(config, "pad_token_id", None) is None and tokenizer.pad_token_id is not None:
            config.pad_token_id = tokenizer.pad_token_id


def _train_every_token(model: Any) -> None:
    """Give the padding token a gradient, too, where a model writes it.

    Its class leaves that out if its config named the token when it was made. A checkpoint's config does, the
    config it began with may not, and then a resumed run would not go on like an untouched one.
    """
    model.get_input_embeddings().padding_idx = None


@torch.no_grad()
def _align(model: Any) -> None:
    """Copy the weights that lie in memory where their file has them, at any multiple of eight bytes.

    A matrix product adds up in another order there, so that equal weights of another file would give other
    bits: those of a checkpoint and those that the run began with.
    """
    for parameter in model.parameters():
        if parameter.data_ptr() % _ALIGNMENT:
            parameter.data = parameter.data.clone()


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
