"""Whether a run can be resumed from a checkpoint: its next step must see the data that it would have seen.

The order of the data is a function of the samples, the seed and the size of a step. If one of them changed,
step 5 of one run and step 6 of the other would learn some rows twice and others never, so that is refused.
Any other setting may change, such as the learning rate, and is named in the log.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from rollbook.errors import UsageError
from rollbook.records.config import diff_configs, dump_config, read_config
from rollbook.records.layout import RunFiles
from rollbook.sft.job import Job
from rollbook.sft.settings import SftSettings
from rollbook.train.state import read_extra

# Settings that may be why the data of a step differs; named where it does.
_OF_DATA = (
    "data.train", "data.max_length", "data.too_long", "data.packing", "data.may_drop", "model.chat_template",
    "model.tokenizer", "model.lora", "model.path", "model.from", "model.config", "training.seed",
    "training.per_device_train_batch_size", "training.gradient_accumulation_steps", "processes",
)  # fmt: skip


_ROWS = "rows per step"


class Progress(msgspec.Struct):
    """How far a run is, and the sums that its next lines are made from. Saved with every checkpoint."""

    step: int = 0
    tokens: int = 0  # with prompts, without padding
    loss_sum: float = 0.0  # over the steps that were applied
    skipped_steps: int = 0  # something was not finite
    left_out: list[int] = []  # which of the last steps that was
    elapsed_s: float = 0.0
    # Since the last logged step:
    window_loss: float = 0.0
    window_steps: int = 0
    window_tokens: int = 0
    window_allocated: int = 0
    window_s: float = 0.0

    def clear_window(self) -> None:
        self.window_loss = self.window_s = 0.0
        self.window_steps = self.window_tokens = self.window_allocated = 0


def saved_state(job: Job, progress: Progress) -> dict[str, Any]:
    """What a checkpoint holds beside weights, optimiser and random states."""
    return {"sft": {"progress": msgspec.to_builtins(progress), "data": _data_fingerprint(job)}}


def load_progress(checkpoint: Path, job: Job) -> Progress:
    """The progress of a checkpoint that this job can continue; else an error names what changed."""
    further = f"model.path: {checkpoint} with another output_dir trains its weights further"
    stored = read_extra(checkpoint).get("sft")
    if stored is None:
        raise UsageError(f"cannot resume {checkpoint}: it was saved by another trainer; {further}")
    before, now = stored["data"], _data_fingerprint(job)
    if different := [name for name in now if before.get(name) != now[name]]:
        named = [change for change in changes(checkpoint.parent, job.settings) if change.startswith(_OF_DATA)]
        hint = _same_rows(before, job) if different == [_ROWS] else ""
        raise UsageError(
            f"cannot resume {checkpoint}: {'; '.join(named) or ', '.join(different)} changed since it was "
            f"saved. Undo the change{hint}, or start over with --overwrite; {further}"
        )
    progress = msgspec.convert(stored["progress"], Progress)
    if progress.step > job.total_steps:
        raise UsageError(
            f"cannot resume {checkpoint}: it is at step {progress.step}, but the settings end at step "
            f"{job.total_steps}; {further}"
        )
    return progress


def _same_rows(before: dict[str, Any], job: Job) -> str:
    """With what settings this number of processes takes the steps of another one."""
    steps, rest = divmod(before[_ROWS], job.epochs.rows_per_micro_batch)
    if rest:
        return ""
    return f" (with training.gradient_accumulation_steps: {steps} a step has {before[_ROWS]} rows, as it had)"


def changes(directory: Path, settings: SftSettings) -> list[str]:
    """The settings that differ from those in the run's config.json, as `key: old -> new`."""
    path = RunFiles(directory).config
    if not path.exists():
        return []
    found = diff_configs(read_config(path), dump_config(msgspec.to_builtins(settings)))
    return [f"{change.key}: {change.old!r} -> {change.new!r}" for change in found]


def _data_fingerprint(job: Job) -> dict[str, Any]:
    """What the data of every step follows from, in the names of the settings."""
    settings, model = job.settings, job.settings.model
    weights = [dataset.weight for dataset in settings.data.train]
    keys = [store.key for store in job.corpus.stores]  # of the files, the tokenizer and the template
    base = None if model.lora is None else [model.path, model.handed_over, model.config]
    return {
        "data.train (the files, or the tokenizer)": [list(pair) for pair in zip(keys, weights, strict=True)],
        "data.packing": job.model.packs,
        "training.seed": settings.training.seed,
        _ROWS: job.epochs.rows_per_step,
        "model.lora": msgspec.to_builtins(model.lora),
        "the model below model.lora": base,
    }
