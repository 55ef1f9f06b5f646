"""Checkpoints of a run: written complete or not at all, and how many of them are kept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rollbook.records.complete import remove_directory
from rollbook.rl.opening import Job
from rollbook.runs.jobs.finish import HANDED_OVER
from rollbook.train.state import save_training_state


def checkpoint_name(batch: int) -> str:
    return f"{batch:06d}"


def save(job: Job, batch: int, log_lengths: Mapping[str, int] | None = None) -> Path:
    """Write the checkpoint from which iteration `batch` is the next one; returns its directory.

    `log_lengths` are those of the logs where they have gone on since.
    """
    name = checkpoint_name(batch)
    final = batch == job.settings.iterations
    with job.run.checkpoint(name, batch=batch, final=final, log_lengths=log_lengths) as directory:
        trainer = job.trainer
        save_training_state(directory, trainer.model, trainer.optimizer, job.sources.as_extra())
    rotate(job)
    return job.run.files.checkpoint(name)


def rotate(job: Job) -> None:
    """Delete the oldest checkpoints beyond `save_total_limit`, but not the best by the first eval or one
    handed over.
    """
    limit, root = job.settings.save_total_limit, job.run.files.checkpoint_root
    if limit is None or not root.exists():
        return
    batches = sorted(int(entry.name) for entry in root.iterdir() if entry.name.isdecimal())
    kept = set(batches[-limit:]) | set(_handed_over(job.run.files.root))
    if job.settings.evals:
        key = f"{job.settings.evals[0].name}/env/all/reward/total"
        evaluated = {step: reward for step, reward in job.history[key].items() if step in batches}
        if evaluated:
            kept.add(max(evaluated, key=lambda step: (evaluated[step], step)))
    for batch in batches:
        if batch not in kept:
            remove_directory(root / checkpoint_name(batch))


def _handed_over(directory: Path) -> list[int]:
    marker = directory / HANDED_OVER
    names = [Path(line).name for line in marker.read_text().splitlines()] if marker.exists() else []
    return [int(name) for name in names if name.isdecimal()]
