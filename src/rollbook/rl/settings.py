"""The settings of `rollbook rl`: typed, with the names the field uses and defaults that work."""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from rollbook.envs.registry import ENVIRONMENTS
from rollbook.errors import UsageError
from rollbook.records.config import diff_configs, dump_config
from rollbook.records.token_settings import TrainerSettings, with_token_export
from rollbook.rl import advantages
from rollbook.rl.schedule import groups_drawn
from rollbook.rollouts.retry import RetrySettings
from rollbook.runs.divergence import MOST, MaxNonfiniteSteps
from rollbook.runs.settings import merge, parse_words, read_yaml, refuse_unknown, typed
from rollbook.train.losses import AnyLoss, ImportanceSampling, Loss, ReferenceKl
from rollbook.train.model_settings import ModelSettings
from rollbook.train.schedule import Schedule

Count = Annotated[int, msgspec.Meta(ge=1)]
CountOrNone = Annotated[int, msgspec.Meta(ge=1)] | None
NonNegative = Annotated[int, msgspec.Meta(ge=0)]
Amount = Annotated[float, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]

# Keys of an entry of `environments` that are ours; all others are settings of the environment itself.
_OURS = ("name", "as", "weight", "tasks", "system", "max_turns")
# Settings that a resumed run may change; any other difference is refused.
MAY_CHANGE = frozenset(
    {"iterations", "save_every", "save_total_limit", "evals", "num_groups_to_log", "samples_every",
     "on_alert", "trackers", "trainer", "stall_after_s", "log_path", "name", "max_nonfinite_steps"}
)  # fmt: skip


class EnvironmentSettings(msgspec.Struct, kw_only=True, frozen=True):
    """One environment: which, how often it is drawn, and the settings that are its own."""

    name: str  # a built-in, module:name, or path.py:name
    label: str  # the name in metrics, tags and evals: `as`, else `name`
    weight: Positive = 1.0
    tasks: str | Count | None = None  # a file of tasks, or how many the environment makes itself
    system: str | None = None  # a system prompt in front of every task
    max_turns: Count = 16
    settings: dict[str, Any] = {}


class SamplerSettings(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """How the trainer's own weights are sampled from."""

    kind: Literal["local"] = "local"
    max_tokens: Count = 256  # per turn
    max_episode_tokens: CountOrNone = None  # prompts and replies of an episode together
    temperature: Positive = 1.0
    stop: list[str] = []
    max_length: CountOrNone = None  # tokens of a sequence with its prompt; chosen from the tasks by default
    slots: CountOrNone = None  # rows of the batch that samples; chosen for the machine by default
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if not all(self.stop):
            raise ValueError("stop: a stop string must not be empty")
        if self.top_p != 1.0 or self.top_k != 0:
            raise ValueError(
                "top_p and top_k are not supported in training: the trainer's probabilities are those of the "
                "full distribution. Leave them out"
            )


class EvalSettings(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """An evaluation inside the run: before the first iteration, every so many, and after the last."""

    name: str
    environment: str  # the label of one of `environments`
    tasks: str | Count = 64  # a file, or how many; they are kept out of training by id
    every: NonNegative = 0  # 0: only before the first and after the last iteration
    samples: Count = 1
    temperature: Amount = 0.0
    max_tokens: CountOrNone = None  # by default the sampler's


class RlSettings(msgspec.Struct, kw_only=True, frozen=True):
    log_path: str
    model: ModelSettings
    environments: list[EnvironmentSettings]
    seed: NonNegative = 0
    name: str | None = None
    sampler: SamplerSettings = SamplerSettings()
    groups_per_batch: Count = 16
    group_size: Annotated[int, msgspec.Meta(ge=2)] = 8
    iterations: NonNegative = 40
    learning_rate: Amount = 1e-5
    lr_scheduler_type: Schedule = "constant"
    warmup_steps: NonNegative = 0
    weight_decay: Amount = 0.0
    adam_beta1: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.95
    adam_epsilon: Positive = 1e-8
    max_grad_norm: Amount = 1.0
    max_nonfinite_steps: MaxNonfiniteSteps = MOST  # of the last 100; with more of them the run has failed
    minibatches: Count = 1  # optimiser steps per pass over a batch
    epochs: Count = 1  # passes over a batch
    loss: AnyLoss = ImportanceSampling()  # or one of the caller's own, see load_settings
    advantage: advantages.Name = "mean"
    truncated: Literal["train", "mask", "drop"] = "train"
    oversample: Annotated[float, msgspec.Meta(ge=1)] = 1.0
    evals: list[EvalSettings] = []
    save_every: Count = 10
    save_total_limit: CountOrNone = None
    num_groups_to_log: NonNegative = 4
    layout: Literal["flat", "nested"] = "flat"  # nested is where tinker-cookbook's own tools look
    samples_every: NonNegative = 10  # iterations between two samples of text in the terminal; 0: none
    on_alert: Literal["continue", "stop"] = "continue"
    retry: RetrySettings = msgspec.field(default_factory=RetrySettings)
    episode_timeout_s: Positive | None = None
    stall_after_s: Positive | None = None  # by default five times the median time of sampling
    trackers: Any = None
    trainer: TrainerSettings = TrainerSettings()  # the token export is here
    processes: Count = 1
    micro_batch_tokens: CountOrNone = None  # chosen for the machine by default
    threads: CountOrNone = None  # the same

    @property
    def run_name(self) -> str:
        return self.name or Path(self.log_path).name

    @property
    def groups_drawn(self) -> int:
        """How many groups an iteration samples, so that enough of them are not constant."""
        return groups_drawn(self.groups_per_batch, self.oversample)


def load_settings(
    config: Path | Mapping[str, Any], words: Sequence[str] = (), *, loss: Loss | None = None
) -> RlSettings:
    """The settings of a file (or a mapping) with `key=value` words on top; raises a UsageError that names
    the key. `loss` is one of the caller's own.
    """
    named = str(config) if isinstance(config, Path) else "the settings"
    values = dict(read_yaml(config)) if isinstance(config, Path) else dict(config)
    values = with_token_export(merge(values, parse_words(words)))
    for key in ("meta_info", "runtime_info"):  # blocks of a config that results are handed over in
        values.pop(key, None)
    if loss is not None:
        values = {key: value for key, value in values.items() if key not in ("loss", "loss_fn")}
    if "loss_fn" in values:  # tinker's name for it
        if "loss" in values:
            raise UsageError(f"{named}: loss and loss_fn are the same setting; leave out loss_fn")
        values["loss"] = {"name": values.pop("loss_fn")}
    if isinstance(values.get("loss"), Mapping):
        _check_name_of_loss(values["loss"].get("name"), named)
    for key in ("log_path", "model", "environments"):
        if not values.get(key):
            raise UsageError(f"{named}: {key} is missing; write {key}: {_EXAMPLES[key]}")
    entries = values["environments"]
    if not isinstance(entries, list):
        raise UsageError(f"{named}: environments must be a list; write environments: [{{name: arithmetic}}]")
    values["environments"] = [_environment(entry, number) for number, entry in enumerate(entries)]
    for number, entry in enumerate(values.get("evals") or []):
        if isinstance(entry, Mapping):
            refuse_unknown(entry, EvalSettings, f"evals[{number}]")
    settings = typed(values, RlSettings)
    _check(settings)
    return settings if loss is None else msgspec.structs.replace(settings, loss=loss)


_EXAMPLES = {
    "log_path": "runs/first",
    "model": "{path: DIR}",
    "environments": "[{name: arithmetic}]",
}


def _check_name_of_loss(name: Any, where: str) -> None:
    known = [str(kind.__struct_config__.tag) for kind in typing.get_args(AnyLoss)]
    if name is not None and name not in known:
        raise UsageError(
            f"{where}: there is no loss {name!r}; there are: {', '.join(known)}. One of your own is passed "
            "as an object: rollbook.rl(config, loss=...)"
        )


def _environment(entry: Any, number: int) -> dict[str, Any]:
    """An entry with the environment's own settings in a mapping of their own."""
    where = f"environments[{number}]"
    if isinstance(entry, str | type):
        entry = {"name": entry}
    if isinstance(entry, Mapping) and isinstance(kind := entry.get("name"), type):
        entry = {"as": kind.__name__, **entry, "name": _name_of(kind)}
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
        raise UsageError(f"{where}: name is missing; write {{name: arithmetic}}")
    if set(entry) <= set(EnvironmentSettings.__struct_fields__) and "label" in entry:
        return dict(entry)  # as a run's config.json has it
    common = {key: entry[key] for key in _OURS if key in entry}
    label = common.pop("as", None) or _label(str(entry["name"]))
    own = {key: value for key, value in entry.items() if key not in _OURS}
    return {**common, "label": str(label), "settings": own}


def _name_of(kind: type) -> str:
    """A name for a class of the caller's that a config.json can hold, and by which it is found here."""
    name = f"{kind.__module__}:{kind.__qualname__}"
    ENVIRONMENTS[name] = kind
    return name


def _label(name: str) -> str:
    """`path/guess.py:Guess` as `Guess`: a name that can stand in a metric's key."""
    return name.rpartition(":")[2] or name


def _check(settings: RlSettings) -> None:
    for environment in settings.environments:
        if environment.name == "gym" or environment.name.startswith("verifiers:"):
            raise UsageError(
                f"environment {environment.name!r} asks an endpoint itself, so the tokens it samples are not "
                "known to the trainer; it can be used with `rollbook collect`, not yet with `rollbook rl`"
            )
    labels = [environment.label for environment in settings.environments]
    for label in labels:
        if labels.count(label) > 1:
            raise UsageError(
                f"two environments are called {label!r}; give one of them another name with `as:`"
            )
        if label == "all" or "/" in label:
            raise UsageError(
                f"environment {label!r} cannot be a part of a metric's key; set another with `as:`"
            )
    names = [evaluation.name for evaluation in settings.evals]
    for evaluation in settings.evals:
        if evaluation.environment not in labels:
            raise UsageError(
                f"evals: {evaluation.name!r} names the environment {evaluation.environment!r}, which is not "
                f"among environments: {', '.join(labels)}"
            )
        if names.count(evaluation.name) > 1:
            raise UsageError(f"two evals are called {evaluation.name!r}; give one of them another name")
    if isinstance(settings.loss, ReferenceKl):
        raise UsageError(
            "loss reference_kl needs the log-probabilities of a reference model, which `rollbook rl` does "
            "not compute; choose another loss"
        )
    if settings.model.compile != "auto":
        raise UsageError("model.compile is a setting of `rollbook sft`; leave it out")
    if settings.iterations == 0 and not settings.evals:
        raise UsageError("iterations is 0 and evals is empty, so there is nothing to do; name an eval")


def differences(before: Mapping[str, Any], now: RlSettings) -> list[str]:
    """Settings that a resumed run must not change and that differ from its config.json, as `key: a -> b`.

    What was decided when it was started (slots, threads, tokens of a micro-batch; the directory of a model
    that is handed over) counts only where it is set by hand.
    """
    changes = diff_configs(before, dump_config(msgspec.to_builtins(now)))
    found = [
        str(change)
        for change in changes
        if re.split(r"[.[]", change.key, maxsplit=1)[0] not in MAY_CHANGE
        and not (change.key in _DECIDED and change.new is None)
    ]
    if now.lr_scheduler_type != "constant" and before.get("iterations") != now.iterations:
        found.append(
            f"iterations: {before.get('iterations')} -> {now.iterations} (the rate of each iteration follows "
            f"from their number with lr_scheduler_type {now.lr_scheduler_type})"
        )
    return found


_DECIDED = frozenset({"threads", "micro_batch_tokens", "sampler.slots", "sampler.max_length", "model.path"})
