"""The settings of a fine-tuning: typed, with the names the field uses, every one with a default that works.

A file may hold them at its top or below `runtime_info.input`, the block form whose `runtime_info.output` the
result is handed over in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from rollbook.errors import UsageError
from rollbook.records.columns import USUAL, Columns
from rollbook.records.token_settings import TrainerSettings, with_token_export
from rollbook.runs.divergence import MOST, MaxNonfiniteSteps
from rollbook.runs.settings import merge, parse_words, read_yaml, typed
from rollbook.train.model_settings import ModelSettings, OptimizerSettings
from rollbook.train.schedule import Schedule

BLOCK = ("runtime_info", "input")
Count = Annotated[int, msgspec.Meta(ge=1)]
NonNegative = Annotated[int, msgspec.Meta(ge=0)]
Amount = Annotated[float, msgspec.Meta(ge=0)]
BelowOne = Annotated[float, msgspec.Meta(ge=0, lt=1)]


class DatasetSettings(msgspec.Struct, kw_only=True):
    path: str
    weight: Amount = 1.0  # how often an epoch goes through it; 0.5 is half of it, 2 is twice
    # Names of the prompt and the answer, where they are no usual ones. Unset, it is in no config.json.
    columns: Columns | msgspec.UnsetType = msgspec.UNSET
    format: Literal["auto", "messages", "prompt_completion", "alpaca", "sharegpt"] = "auto"

    @property
    def names(self) -> Columns:
        return USUAL if self.columns is msgspec.UNSET else self.columns


class DataSettings(msgspec.Struct, kw_only=True):
    train: list[DatasetSettings]
    eval: list[DatasetSettings] = []
    max_length: Annotated[int, msgspec.Meta(ge=2)] = 1024
    too_long: Literal["auto", "drop", "truncate"] = "auto"  # drop; LLaMA-Factory can only truncate
    train_on: Literal["assistant", "last"] = "assistant"  # every reply, or only the last one
    packing: Literal["auto", "on", "off"] = "auto"
    # What of a message a chat template may leave out; a row that loses anything else is refused.
    may_drop: list[Literal["content", "reasoning", "tool_calls", "tool_results"]] = []


class TrainingSettings(msgspec.Struct, kw_only=True):
    output_dir: str
    num_train_epochs: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    max_steps: Count | None = None
    per_device_train_batch_size: Count = 8  # rows of max_length tokens, each of several sequences if packed
    gradient_accumulation_steps: Count = 1
    learning_rate: Amount = 2e-5
    lr_scheduler_type: Schedule = "cosine"
    warmup_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.03
    warmup_steps: NonNegative | None = None
    weight_decay: Amount = 0.0
    adam_beta1: BelowOne = 0.9
    adam_beta2: BelowOne = 0.999
    adam_epsilon: Amount = 1e-8
    max_grad_norm: Amount = 1.0
    max_nonfinite_steps: MaxNonfiniteSteps = MOST  # of the last 100; with more of them the run has failed
    logging_steps: Count = 1
    save_steps: Count = 500
    save_total_limit: Count | None = None
    eval_steps: Count | None = None
    seed: NonNegative = 42

    def __post_init__(self) -> None:
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

    def warmup(self, total_steps: int) -> int:
        if self.warmup_steps is not None:
            return self.warmup_steps
        return math.ceil(self.warmup_ratio * total_steps)


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
    processes: Count = 1  # started by torchrun when there are several
    trackers: Any = None
    columns: Columns = USUAL  # of all datasets that have none of their own
    trainer: TrainerSettings = TrainerSettings()  # the token export is here

    @property
    def run_name(self) -> str:
        return self.name or Path(self.training.output_dir).name

    def output_dir(self, artifacts: Path) -> Path:
        """A relative output_dir means artifacts/model/<its last part>; an absolute one is used as it is."""
        given = Path(self.training.output_dir)
        return given if given.is_absolute() else artifacts / "model" / given.name


def load_settings(config: Path, overrides: Sequence[str] = ()) -> SftSettings:
    """The settings of a file with `key=value` words on top."""
    values = with_token_export(merge(_inputs(read_yaml(config), config), parse_words(overrides)))
    for name in ("model", "data", "training"):
        if not isinstance(values.get(name), Mapping):
            raise UsageError(f"{config}: {name} is missing; write {name}: with its settings below")
    for section, key in (("data", "packing"), ("model", "compile")):
        if isinstance(switch := values[section].get(key), bool):  # what YAML makes of on and off
            values[section][key] = "on" if switch else "off"
    for place in ("train", "eval"):
        if place in values["data"]:
            values["data"][place] = _datasets(values["data"][place], values.get("columns"))
    settings = typed(values, SftSettings)
    _check(settings)
    return settings


def _inputs(values: dict[str, Any], config: Path) -> dict[str, Any]:
    block = values.get(BLOCK[0])
    if not isinstance(block, Mapping):
        return {key: value for key, value in values.items() if key != "meta_info"}
    given = block.get(BLOCK[1])
    top = {key: value for key, value in values.items() if key not in ("meta_info", BLOCK[0])}
    if not isinstance(given, Mapping):
        return top
    # The block `trainer` may stand at the top of every config, where a trainer's own would have it.
    twice = [key for key in top if key != "trainer" or key in given]
    if twice:
        raise UsageError(
            f"{config}: settings stand both at the top ({', '.join(twice)}) and in runtime_info.input"
        )
    return {**given, **top}


def _datasets(value: Any, columns: Any) -> Any:
    """A file, or a list of files and of mappings; `columns` are of those that have none of their own."""
    if not isinstance(value, list | str):
        return value
    entries = [{"path": value}] if isinstance(value, str) else value
    listed = [{"path": entry} if isinstance(entry, str) else entry for entry in entries]
    own = {} if columns is None else {"columns": columns}
    return [{**own, **entry} if isinstance(entry, Mapping) else entry for entry in listed]


def _check(settings: SftSettings) -> None:
    if not settings.data.train:
        raise UsageError("data.train is empty; name a file")
    if settings.training.eval_steps is not None and not settings.data.eval:
        raise UsageError("training.eval_steps is set and data.eval is empty; name a file to evaluate on")
