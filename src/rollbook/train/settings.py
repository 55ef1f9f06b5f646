"""The settings of a training job: typed, with the names the field uses, every one with a default that works.

A file may hold them at its top or below `runtime_info.input`, the block form whose `runtime_info.output` the
result is handed over in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from rollbook.errors import UsageError
from rollbook.runs.settings import merge, parse_words, read_yaml, refuse_unknown, typed
from rollbook.train.model_settings import ModelSettings, OptimizerSettings
from rollbook.train.schedule import Schedule

BLOCK = ("runtime_info", "input")


def _at_least(least: int, settings: msgspec.Struct, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if value is not None and not least <= value < math.inf:
            raise ValueError(f"{name} must be at least {least}, not {value}")


class DatasetSettings(msgspec.Struct, kw_only=True):
    path: str
    weight: float = 1.0  # how often an epoch goes through it; 0.5 is half of it, 2 is twice
    format: Literal["auto", "messages", "prompt_completion", "alpaca", "sharegpt"] = "auto"

    def __post_init__(self) -> None:
        _at_least(0, self, "weight")


class DataSettings(msgspec.Struct, kw_only=True):
    train: list[DatasetSettings]
    eval: list[DatasetSettings] = []
    max_length: int = 1024
    too_long: Literal["auto", "drop", "truncate"] = "auto"  # drop; LLaMA-Factory can only truncate
    train_on: Literal["assistant", "last"] = "assistant"  # every reply, or only the last one
    packing: Literal["auto", "on", "off"] = "auto"
    # What of a message a chat template may leave out; a row that loses anything else is refused.
    may_drop: list[Literal["content", "reasoning", "tool_calls", "tool_results"]] = []

    def __post_init__(self) -> None:
        _at_least(2, self, "max_length")


class TrainingSettings(msgspec.Struct, kw_only=True):
    output_dir: str
    num_train_epochs: float = 1.0
    max_steps: int | None = None
    per_device_train_batch_size: int = 8  # rows of max_length tokens, each of several sequences when packed
    gradient_accumulation_steps: int = 1
    learning_rate: float = 2e-5
    lr_scheduler_type: Schedule = "cosine"
    warmup_ratio: float = 0.03
    warmup_steps: int | None = None
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    logging_steps: int = 1
    save_steps: int = 500
    save_total_limit: int | None = None
    eval_steps: int | None = None
    seed: int = 42

    def warmup(self, total: int) -> int:
        """How many of so many steps the learning rate rises for."""
        return math.ceil(self.warmup_ratio * total) if self.warmup_steps is None else self.warmup_steps

    def __post_init__(self) -> None:
        _at_least(
            1, self, "per_device_train_batch_size", "gradient_accumulation_steps",
            "logging_steps", "save_steps", "max_steps", "eval_steps", "save_total_limit",
        )  # fmt: skip
        _at_least(
            0, self, "learning_rate", "warmup_ratio", "warmup_steps", "weight_decay",
            "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "seed",
        )  # fmt: skip
        for name in ("adam_beta1", "adam_beta2"):
            if getattr(self, name) >= 1:
                raise ValueError(f"{name} must be less than 1, not {getattr(self, name)}")
        if self.warmup_ratio > 1:
            raise ValueError(f"warmup_ratio is a part of all steps, so not {self.warmup_ratio}")
        if not 0 < self.num_train_epochs < math.inf and self.max_steps is None:
            raise ValueError(f"num_train_epochs must be more than 0, not {self.num_train_epochs}")
        if Path(self.output_dir).name in ("", ".."):
            raise ValueError(f"output_dir {self.output_dir!r} has no name of its own; write demo")

    @property
    def optimizer(self) -> OptimizerSettings:
        return OptimizerSettings(
            learning_rate=self.learning_rate,
            betas=(self.adam_beta1, self.adam_beta2),
            eps=self.adam_epsilon,
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm,
        )


class LlamaFactorySettings(msgspec.Struct, kw_only=True):
    """How to reach a LLaMA-Factory that lives in an environment of its own."""

    command: str = "llamafactory-cli"
    template: str = "default"
    arguments: dict[str, Any] = {}  # further keys of its YAML, as they are


class SftSettings(msgspec.Struct, kw_only=True):
    model: ModelSettings
    data: DataSettings
    training: TrainingSettings
    name: str | None = None
    engine: Literal["rollbook", "llamafactory"] = "rollbook"
    llamafactory: LlamaFactorySettings = msgspec.field(default_factory=LlamaFactorySettings)
    processes: int = 1  # started by torchrun when there are several

    @property
    def run_name(self) -> str:
        return self.name or Path(self.training.output_dir).name

    def output_dir(self, artifacts: Path) -> Path:
        """A relative output_dir means artifacts/model/<its last part>; an absolute one is used as it is."""
        given = Path(self.training.output_dir)
        return given if given.is_absolute() else artifacts / "model" / given.name


def load_settings(config: Path, words: Sequence[str] = ()) -> SftSettings:
    values = _inputs(read_yaml(config), config)
    values = merge(values, parse_words(words))
    for name in ("model", "data", "training"):
        if not isinstance(values.get(name), Mapping):
            raise UsageError(f"{config}: {name} is missing; write {name}: with its settings below")
    for place in ("train", "eval"):
        sets = values["data"].get(place)
        if isinstance(sets, str):
            sets = values["data"][place] = [sets]
        for number, dataset in enumerate(sets if isinstance(sets, list) else []):
            if isinstance(dataset, str):
                sets[number] = {"path": dataset}
            elif isinstance(dataset, Mapping):
                refuse_unknown(dataset, DatasetSettings, f"data.{place}[{number}]")
    settings = typed(values, SftSettings)
    _check(settings)
    return settings


def _inputs(values: dict[str, Any], config: Path) -> dict[str, Any]:
    block = values.get(BLOCK[0])
    if not isinstance(block, Mapping):
        return {key: value for key, value in values.items() if key != "meta_info"}
    given = block.get(BLOCK[1])
    top = {key: value for key, value in values.items() if key not in ("meta_info", BLOCK[0])}
    if isinstance(given, Mapping) and top:
        raise UsageError(
            f"{config}: settings stand both at the top ({', '.join(top)}) and in runtime_info.input"
        )
    return dict(given) if isinstance(given, Mapping) else top


def _check(settings: SftSettings) -> None:
    model = settings.model
    given = [name for name in ("path", "handed_over", "config") if getattr(model, name) is not None]
    if len(given) != 1:
        raise UsageError("model: give exactly one of path, from (a config.yaml) and config (random weights)")
    if model.config is not None and model.tokenizer is None:
        raise UsageError("model.tokenizer is missing; a model built from a config has none of its own")
    if model.config is not None and model.lora is not None:
        raise UsageError("model.lora: adapters are saved without the weights below them; set model.path")
    if not settings.data.train:
        raise UsageError("data.train is empty; name a file")
    if settings.training.eval_steps is not None and not settings.data.eval:
        raise UsageError("training.eval_steps is set and data.eval is empty; name a file to evaluate on")
    if settings.processes < 1:
        raise UsageError(f"processes must be at least 1, not {settings.processes}")
