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
from rollbook.sft.job import Job
from rollbook.sft.resumable import FILES, refusal, settings_fingerprint, train_further
from rollbook.train.state import read_extra


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
    window_export_s: float = 0.0  # that the loop has waited for the token export

    def clear_window(self) -> None:
        self.window_loss = self.window_s = self.window_export_s = 0.0
        self.window_steps = self.window_tokens = self.window_allocated = 0


def saved_state(job: Job, progress: Progress) -> dict[str, Any]:
    """What a checkpoint holds beside weights, optimiser and random states."""
    return {"sft": {"progress": msgspec.to_builtins(progress), "data": _data_fingerprint(job)}}


def load_progress(checkpoint: Path, job: Job) -> Progress:
    """The progress of a checkpoint that this job can continue; else an error names what changed."""
    further = train_further(checkpoint)
    stored = read_extra(checkpoint).get("sft")
    if stored is None:
        raise UsageError(f"cannot resume {checkpoint}: it was saved by another trainer; {further}")
    before, now = stored["data"], _data_fingerprint(job)
    if different := [name for name in now if before.get(name) != now[name]]:
        raise refusal(checkpoint, job.settings, different, before)
    progress = msgspec.convert(stored["progress"], Progress)
    if progress.step > job.total_steps:
        raise UsageError(
            f"cannot resume {checkpoint}: it is at step {progress.step}, but the settings end at step "
            f"{job.total_steps}; {further}"
        )
    return progress


def _data_fingerprint(job: Job) -> dict[str, Any]:
    """What the data of every step follows from, in the names of the settings."""
    weights = [dataset.weight for dataset in job.settings.data.train]
    keys = [store.key for store in job.corpus.stores]  # of the files, the tokenizer and the template
    return {
        FILES: [list(pair) for pair in zip(keys, weights, strict=True)],
        "data.packing": job.model.packs,
        **settings_fingerprint(job.settings),
    }
