"""Checkpoints that are complete or absent: a Hugging Face directory, and all that is needed to go on from it.

`checkpoint-<step>/` holds weights and tokenizer as `from_pretrained` reads them, and beside them the
optimiser, the random states and `trainer_state.json`. It is written aside, marked `COMPLETE` last, and
renamed; whoever lists the directory sees whole checkpoints only. Files are readable for others, as the umask
says.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import state_dict as distributed_state

from rollbook.errors import BadFileError, RollbookError
from rollbook.records.atomic import fsync_directory
from rollbook.records.complete import COMPLETE
from rollbook.runs.saved_models import SavedModel, newest_model, saved_models
from rollbook.train.model import TrainedModel
from rollbook.train.optimizer import Optimizer
from rollbook.train.processes import Processes
from rollbook.train.trainer_files import STATE, state_bytes

_OPTIMIZER, _SCHEDULER = "optimizer.pt", "scheduler.pt"


class NotSavedError(RollbookError):
    """A checkpoint that could not be written; nothing of it is left."""


def save_checkpoint(
    directory: Path,
    model: TrainedModel,
    optimizer: Optimizer,
    processes: Processes,
    state: Mapping[str, Any],
) -> Path:
    """All processes call it; the first one writes. Returns the finished directory."""
    step = int(state["global_step"])
    final = directory / f"checkpoint-{step}"
    aside = directory / f".checkpoint-{step}.making"
    weights, moments = _gathered(model, optimizer, processes)
    if processes.is_first:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    processes.wait_for_all()
    torch.save(_random_states(), aside / _random_name(processes))
    processes.wait_for_all()
    if processes.is_first:
        try:
            model.model.save_pretrained(aside, state_dict=weights)
            model.tokenizer.save_pretrained(aside)
            torch.save(moments, aside / _OPTIMIZER)
            torch.save({"last_epoch": step}, aside / _SCHEDULER)
            (aside / STATE).write_bytes(state_bytes(state))
            _make_durable(aside)
        except Exception as error:  # libraries say "unexpected pos 566784" of a disk that is full
            free = shutil.disk_usage(directory).free
            shutil.rmtree(aside, ignore_errors=True)
            raise NotSavedError(
                f"{final.name} could not be written ({type(error).__name__}: {error}) with {free:,} bytes "
                f"left on the disk of {directory}; make room, and go on from the last one with --resume"
            ) from error
        (aside / COMPLETE).touch()
        fsync_directory(aside)
        shutil.rmtree(final, ignore_errors=True)
        aside.rename(final)
        fsync_directory(directory)
    processes.wait_for_all()
    return final


def load_training_state(
    checkpoint: Path, optimizer: Optimizer, model: TrainedModel, processes: Processes
) -> None:
    """Optimiser and random states; the weights were loaded from the checkpoint as any model is."""
    moments = torch.load(checkpoint / _OPTIMIZER, map_location="cpu", weights_only=True)
    if processes.are_several:
        options = distributed_state.StateDictOptions(full_state_dict=True)
        distributed_state.set_optimizer_state_dict(
            model.model, optimizer.torch_optimizer, moments["adam"], options=options
        )
    else:
        optimizer.load(moments)
    path = checkpoint / _random_name(processes)
    if not path.exists():
        raise BadFileError(
            checkpoint, f"has no {path.name}; resume it with as many processes as it was saved with"
        )
    _restore_random(torch.load(path, map_location="cpu", weights_only=False))


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


def remove_unfinished(directory: Path) -> None:
    """What a killed save or rotation left."""
    for pattern in (".checkpoint-*.making", ".checkpoint-*.removed"):
        for path in directory.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def _gathered(model: TrainedModel, optimizer: Optimizer, processes: Processes) -> tuple[Any, Any]:
    if not processes.are_several:
        return None, optimizer.state()
    options = distributed_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = distributed_state.get_model_state_dict(model.model, options=options)
    adam = distributed_state.get_optimizer_state_dict(model.model, optimizer.torch_optimizer, options=options)
    return weights, {"adam": adam, "copies": None}


def _random_name(processes: Processes) -> str:
    return f"rng_state_{processes.rank}.pth" if processes.are_several else "rng_state.pth"


def _random_states() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {
        "cpu": torch.get_rng_state(),
        "cuda": cuda,
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }


def _restore_random(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["cpu"])
    np.random.set_state(states["numpy"])
    random.setstate(states["python"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _make_durable(directory: Path) -> None:
    mask = os.umask(0)
    os.umask(mask)
    for path in directory.rglob("*"):
        if path.is_file():
            path.chmod(0o666 & ~mask)  # some writers leave files that only the owner can read
            with path.open("rb") as file:
                os.fsync(file.fileno())
