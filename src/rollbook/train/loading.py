"""Loads a model and its tokenizer, as the files of a directory are or with random weights of a config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rollbook.errors import BadFileError, RollbookError, UsageError
from rollbook.train.model import Model, as_list
from rollbook.train.model_files import (
    base_of,
    directory_of,
    first_line,
    holds_adapters,
    read_template,
    refuse_pickles,
    tokenizer_of,
)
from rollbook.train.model_settings import LoraSettings, ModelSettings

_ALIGNMENT = 64  # bytes; what torch gives a new tensor on a CPU
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def load_model(
    settings: ModelSettings, *, seed: int, dtype: torch.dtype, checkpoint: Path | None = None
) -> Model:
    """`dtype` is that of the weights in memory; sharded training keeps them in float32.

    With a checkpoint the weights are its: a whole model, or the adapters over the base of the settings.
    """
    from transformers import AutoTokenizer
    from transformers.utils import logging as transformers_logging

    silence: Any = transformers_logging.disable_progress_bar  # a log has no carriage returns
    silence()
    torch.manual_seed(seed)
    if checkpoint is not None and (settings.lora is not None) != holds_adapters(checkpoint):
        kind = "adapters" if holds_adapters(checkpoint) else "a whole model"
        raise UsageError(f"{checkpoint} holds {kind}: set model.lora as it was, or start with --overwrite")
    source = directory_of(settings) if checkpoint is None else _weights_of(checkpoint, settings)
    words = checkpoint or tokenizer_of(settings) or source
    try:
        tokenizer = AutoTokenizer.from_pretrained(words, trust_remote_code=False)
    except Exception as error:  # files of anybody's, read by a library that names errors in its own way
        raise UsageError(f"the tokenizer of {words}: {_why(error)}") from error
    try:
        model = _from_config(settings.config or {}, dtype) if source is None else _loaded(source, dtype)
    except (RollbookError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UsageError(f"model: {source}: {_why(error)}") from error
    if settings.chat_template is not None and checkpoint is None:
        tokenizer.chat_template = read_template(Path(settings.chat_template))
    _check_vocabulary(model, tokenizer)
    _refuse_not_finite(model, source)
    _stop_where_the_tokenizer_does(model, tokenizer)
    model.config.use_cache = False
    _train_every_token(model)
    _align(model)
    if settings.lora is None:
        return Model(model, tokenizer)
    if checkpoint is None:
        adapted = _with_adapters(model, settings.lora, seed)
    else:
        adapted = _saved_adapters(model, checkpoint)
    return Model(adapted, tokenizer, is_adapter=True)


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


def _weights_of(checkpoint: Path, settings: ModelSettings) -> Path | None:
    """The directory of the weights below what a checkpoint has of its own.

    Adapters need the model below them, which they name where `from` may lead to another one by now.
    """
    if settings.lora is None:
        return checkpoint
    if settings.handed_over is None:
        return directory_of(settings)
    try:
        return base_of(checkpoint)
    except BadFileError:
        return directory_of(settings)


def _loaded(directory: Path, dtype: torch.dtype) -> Any:
    """The weights of a directory. Adapters are put into their base: what is trained next stands on both."""
    from transformers import AutoModelForCausalLM

    refuse_pickles(directory)
    if holds_adapters(directory):
        from peft import PeftModel

        merged: Any = PeftModel.from_pretrained(_loaded(base_of(directory), dtype), directory)
        merged = merged.merge_and_unload()
        merged.name_or_path = str(directory)  # what adapters that are trained next name as their base
        return merged
    load: Any = AutoModelForCausalLM.from_pretrained
    model, found = load(
        directory,
        dtype=dtype,
        trust_remote_code=False,
        use_safetensors=True,
        ignore_mismatched_sizes=True,  # they are refused here, by name
        output_loading_info=True,
    )
    names = sorted({*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])})
    if names:
        raise UsageError(
            f"model: the weights of {directory} are not those of its config.json: {len(names)} are missing "
            f"or have another shape, the first is {names[0]}"
        )
    return model


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
        raise UsageError(f"model.lora: {first_line(error)}") from error


def _saved_adapters(model: Any, checkpoint: Path) -> Any:
    from peft import PeftModel

    try:
        return PeftModel.from_pretrained(model, checkpoint, is_trainable=True)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise UsageError(f"model: {checkpoint}: {_why(error)}") from error


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


def _why(error: Exception) -> str:
    """What went wrong; the library's advice to trust the model's code is not passed on."""
    if "custom code" in str(error) or "trust_remote_code" in str(error):
        return (
            "it asks for code of its own to be run, which is never done; use a model that transformers knows"
        )
    return f"{type(error).__name__}: {first_line(error)}"


@torch.no_grad()
def _refuse_not_finite(model: Any, where: object) -> None:
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise UsageError(f"model: {where}: {name} holds values that are not finite numbers")
