"""Checkpoints in the layout of the Hugging Face Trainer: `checkpoint-<step>/` below an output directory.

The newest one by step, never by time: a copy or a touch changes times. A directory counts only when it is
whole: as its `COMPLETE` says, or, of another trainer, no marker of an unfinished save, a trainer state of its
own step, and every file of its weights in the length that its own header tells.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, NamedTuple

import orjson

from rollbook.records import complete
from rollbook.records.complete import COMPLETE
from rollbook.records.record import decode_json

_NAME = re.compile(r"checkpoint-(\d+)")
_UNFINISHED = "checkpoint-is-incomplete.txt"
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_WHOLE_FILES = ("model.safetensors", "pytorch_model.bin", "consolidated.safetensors")
_LONGEST_HEADER = 100_000_000  # of a file of tensors, as its format allows
_SHARDED = ("pytorch_model_fsdp_0", "model", "latest")

Kind = Literal["full", "adapter", "sharded"]


class SavedModel(NamedTuple):
    path: Path
    step: int
    kind: Kind | None  # None: no weights were found
    complete: bool
    problem: str | None = None


def saved_models(directory: Path) -> list[SavedModel]:
    """Every checkpoint of an output directory, oldest step first."""
    found = []
    for entry in directory.iterdir() if directory.is_dir() else ():
        if (match := _NAME.fullmatch(entry.name)) and entry.is_dir():
            found.append(inspect_model(entry, int(match[1])))
    return sorted(found, key=lambda model: model.step)


def newest_model(directory: Path) -> SavedModel | None:
    """The complete checkpoint with the highest step."""
    return next((model for model in reversed(saved_models(directory)) if model.complete), None)


def inspect_model(path: Path, step: int) -> SavedModel:
    kind, problem = _weights(path)
    if (path / _UNFINISHED).exists():
        problem = "the save did not finish"
    elif (path / COMPLETE).exists():
        problem = complete.problem(path) or problem
    elif problem is None:
        problem = _cut_off(path) or _state_problem(path, step)
    return SavedModel(path, step, kind, problem is None, problem)


def _weights(path: Path) -> tuple[Kind | None, str | None]:
    if (path / "adapter_config.json").exists():
        whole = any((path / f"adapter_model.{end}").exists() for end in ("safetensors", "bin"))
        return "adapter", None if whole else "adapter_model.safetensors is missing"
    for name in _INDEXES:
        if (path / name).exists():
            return "full", _missing_shards(path, name)
    if any((path / name).exists() for name in _WHOLE_FILES):
        return "full", None
    if any((path / name).exists() for name in _SHARDED) or any(path.glob("global_step*")):
        return "sharded", None
    return None, "it has no weights"


def _missing_shards(path: Path, index: str) -> str | None:
    try:
        names = set(orjson.loads((path / index).read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError):
        return f"{index} cannot be read"
    missing = sorted(name for name in names if not (path / name).exists())
    return f"{missing[0]} is missing" if missing else None


def _cut_off(path: Path) -> str | None:
    """Which file of tensors is shorter or longer than its header says."""
    for file in sorted(path.glob("*.safetensors")):
        try:
            wanted = _length_by_header(file)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
            return f"{file.name} has no header that can be read"
        if (size := file.stat().st_size) != wanted:
            return f"{file.name} has {size:,} bytes instead of {wanted:,}"
    return None


def _length_by_header(file: Path) -> int:
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > _LONGEST_HEADER:
            raise ValueError(length)
        tensors: dict[str, Any] = orjson.loads(opened.read(length))
    ends = [int(one["data_offsets"][1]) for name, one in tensors.items() if name != "__metadata__"]
    return 8 + length + max(ends, default=0)


def _state_problem(path: Path, step: int) -> str | None:
    """Other trainers write trainer_state.json last; that it names this step is their mark of completeness."""
    try:
        state = decode_json((path / "trainer_state.json").read_bytes())
    except FileNotFoundError:
        return "trainer_state.json is missing"
    except (OSError, ValueError):
        return "trainer_state.json cannot be read"
    found = state.get("global_step") if isinstance(state, dict) else None
    return None if found == step else f"its trainer state is of step {found}"
