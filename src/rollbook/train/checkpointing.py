"""Checkpoints that are complete or absent: a Hugging Face directory, and all that is needed to go on from it.

`checkpoint-<step>/` holds what `state.py` writes and `trainer_state.json`; whoever lists the directory sees
whole checkpoints only (`records/complete.py`).
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rollbook.errors import RollbookError
from rollbook.records.complete import complete_directory, remove_unfinished, unfinished_path
from rollbook.runs.saved_models import SavedModel, newest_model, saved_models
from rollbook.train.model import Model
from rollbook.train.optimizer import Optimizer
from rollbook.train.processes import Processes
from rollbook.train.state import save_training_state
from rollbook.train.trainer_files import STATE, state_bytes


class NotSavedError(RollbookError):
    """A checkpoint that could not be written; nothing of it is left."""


def save_checkpoint(
    directory: Path,
    model: Model,
    optimizer: Optimizer,
    processes: Processes,
    state: Mapping[str, Any],
) -> Path:
    """All processes call it; the first one writes the weights. Returns the finished directory."""
    final = directory / f"checkpoint-{int(state['global_step'])}"
    first = complete_directory(final, displace=shutil.rmtree) if processes.is_first else nullcontext()
    try:
        with first:
            processes.wait_for_all()
            aside = unfinished_path(final)
            save_training_state(aside, model, optimizer)
            if processes.is_first:
                (aside / STATE).write_bytes(state_bytes(state))
    except RollbookError:
        raise
    except Exception as error:  # libraries say "unexpected pos 566784" of a disk that is full
        free = shutil.disk_usage(directory).free
        raise NotSavedError(
            f"{final.name} could not be written ({type(error).__name__}: {error}) with {free:,} bytes "
            f"left on the disk of {directory}; make room, and go on from the last one with --resume"
        ) from error
    processes.wait_for_all()
    return final


def newest_checkpoint(directory: Path) -> SavedModel | None:
    return newest_model(directory)


def rotate(directory: Path, keep: int | None, protected: Collection[Path]) -> list[Path]:
    """Remove the oldest beyond `keep`, never the newest, the best or one that was handed over."""
    if keep is None:
        return []
    safe = {path.resolve() for path in protected}
    removable = [model for model in saved_models(directory)[:-1] if model.path.resolve() not in safe]
    surplus = len(saved_models(directory)) - keep
    removed = [model.path for model in removable[: max(0, surplus)]]
    for path in removed:
        # Renamed first: a kill in the middle leaves no half checkpoint under a name that counts.
        aside = path.with_name(f".{path.name}.removed")
        path.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
    return removed


def remove_leftovers(directory: Path) -> None:
    """What a killed save or rotation left."""
    remove_unfinished(directory)
    for path in directory.glob(".checkpoint-*.removed"):
        shutil.rmtree(path, ignore_errors=True)
