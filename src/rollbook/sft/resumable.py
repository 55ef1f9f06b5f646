"""What can be said about resuming a run before anything is loaded: it is complete, or its data would change.

Only what is certain without the tokenizer is refused here; `resume.py` compares the rest. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from rollbook.errors import UsageError
from rollbook.records.checkpoints import newest_complete, read_checkpoints
from rollbook.records.config import diff_configs, dump_config, read_config
from rollbook.records.layout import RunFiles
from rollbook.records.trainer_log import RESULTS
from rollbook.sft.settings import SftSettings

STATE_OF_JOB = "training_state.json"  # train.state.EXTRA
ROWS = "rows per step"
FILES = "data.train (the files, or the tokenizer)"  # in a fingerprint: pairs of a key and a weight
# Settings that may be why the data of a step differs; named where it does.
_OF_DATA = (
    "data.train", "data.max_length", "data.too_long", "data.packing", "data.may_drop", "model.chat_template",
    "model.tokenizer", "model.lora", "model.path", "model.from", "model.config", "training.seed",
    "training.per_device_train_batch_size", "training.gradient_accumulation_steps", "processes",
)  # fmt: skip
_OF_SAMPLES = ("data.max_length", "data.too_long", "data.train_on", "data.may_drop")
_OF_LENGTH = ("training.num_train_epochs", "training.max_steps")


def settings_fingerprint(settings: SftSettings) -> dict[str, Any]:
    """What the data of every step follows from, as far as the settings alone say it."""
    model, training = settings.model, settings.training
    per_step = training.per_device_train_batch_size * training.gradient_accumulation_steps
    return {
        "training.seed": training.seed,
        ROWS: per_step * settings.processes,
        "model.lora": msgspec.to_builtins(model.lora),
        "the model below model.lora": (
            None if model.lora is None else [model.path, model.handed_over, model.config]
        ),
    }


def refuse_changed_data(checkpoint: Path, settings: SftSettings) -> None:
    """Refuse a checkpoint whose next step would see other data than it would have seen."""
    try:
        before = json.loads((checkpoint / STATE_OF_JOB).read_bytes())["sft"]["data"]
    except (OSError, ValueError, KeyError, TypeError):  # whoever loads it says what is wrong
        return
    now: dict[str, Any] = settings_fingerprint(settings)
    if (before.get("model.lora") is None) != (now["model.lora"] is None):
        return  # adapters or a whole model: who loads the checkpoint has more to say about that
    different = [name for name in now if name in before and before[name] != now[name]]
    weights = [weight for _, weight in before.get(FILES) or ()]
    if weights != [dataset.weight for dataset in settings.data.train]:
        different.append("data.train")
    of_samples = [change for change in changes(checkpoint.parent, settings) if change.startswith(_OF_SAMPLES)]
    if different or of_samples:
        raise refusal(checkpoint, settings, different, before)


def refusal(
    checkpoint: Path, settings: SftSettings, different: list[str], before: Mapping[str, Any]
) -> UsageError:
    """Names what differs from `before`, the fingerprint of the checkpoint."""
    named = [change for change in changes(checkpoint.parent, settings) if change.startswith(_OF_DATA)]
    hint = _same_rows(before[ROWS], settings) if different == [ROWS] else ""
    return UsageError(
        f"cannot resume {checkpoint}: {'; '.join(named) or ', '.join(different)} changed since it was "
        f"saved. Undo the change{hint}, or start over with --overwrite; {train_further(checkpoint)}"
    )


def _same_rows(rows: int, settings: SftSettings) -> str:
    """With what settings this number of processes takes the steps of another one."""
    steps, rest = divmod(rows, settings.training.per_device_train_batch_size * settings.processes)
    if rest:
        return ""
    return f" (with training.gradient_accumulation_steps: {steps} a step has {rows} rows, as it had)"


def train_further(checkpoint: Path) -> str:
    return f"model.path: {checkpoint} with another output_dir trains its weights further"


def changes(directory: Path, settings: SftSettings) -> list[str]:
    """The settings that differ from those in the run's config.json, as `key: old -> new`."""
    path = RunFiles(directory).config
    if not path.exists():
        return []
    found = diff_configs(read_config(path), dump_config(msgspec.to_builtins(settings)))
    return [f"{change.key}: {change.old!r} -> {change.new!r}" for change in found]


def is_finished(directory: Path, settings: SftSettings) -> bool:
    """Whether the run in a directory took its last step and these settings ask for no more."""
    newest = newest_complete(read_checkpoints(RunFiles(directory).checkpoints), directory)
    if newest is None or not newest.record.final or not (directory / RESULTS).exists():
        return False
    return not any(change.startswith((*_OF_DATA, *_OF_LENGTH)) for change in changes(directory, settings))


def finished_text(directory: Path, settings: SftSettings) -> str:
    more = 2 * settings.training.num_train_epochs
    steps = settings.training.max_steps
    how = f"training.num_train_epochs={more:g}" if steps is None else f"training.max_steps={2 * steps}"
    return f"{directory} is complete: its last step is done. To train on, set more of them, as {how} --resume"
