"""Where the files of a model are: a directory, a handed-over result, or the hub at one commit.

Only safetensors, JSON and text are read. A pickle could run anything, and so could a model's own code; none
is ever loaded, whatever a config.json asks for.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from rollbook.errors import BadFileError, UsageError
from rollbook.records.run_inputs import RunInput, directory_input
from rollbook.train.model_settings import COMMIT, ModelSettings

# Files at the top of a repository: weights, settings, vocabulary, chat template.
_READ = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
_NOT_READ = ("*/*", "consolidated*")  # the same weights in the layout of another program
_ADAPTERS = "adapter_config.json"
_NAME_A_MODEL = "name a directory with the config.json, the weights and the tokenizer of a model"


def directory_of(settings: ModelSettings) -> Path | None:
    """The directory of the weights that training begins with; None for random ones."""
    if settings.config is not None:
        return None
    if settings.hub is not None:
        return download(settings.hub, str(settings.revision))
    if settings.path is None and settings.handed_over is not None:
        from rollbook.runs.handoff import resolve_checkpoint

        return Path(resolve_checkpoint(Path(settings.handed_over)))
    path = Path(str(settings.path))
    if not path.is_dir():
        raise UsageError(f"model.path {path}: no such directory; {_instead_of(path)}")
    if not holds_adapters(path) and not (path / "config.json").exists():
        raise UsageError(f"model.path {path}: it holds no config.json; {_NAME_A_MODEL}")
    return path.absolute()  # adapters name their base, and are read from anywhere


def model_input(settings: ModelSettings) -> RunInput | None:
    """What run.json says of the model that training begins with; None for random weights."""
    if settings.hub is not None:
        return RunInput(what="hub model", path=f"{settings.hub}@{settings.revision}")
    directory = directory_of(settings)
    return None if directory is None else directory_input("model", directory)


def _instead_of(path: Path) -> str:
    """What may have been meant by a directory that is not there."""
    beside = [entry.name for entry in path.parent.iterdir() if entry.is_dir()] if path.parent.is_dir() else []
    if near := difflib.get_close_matches(path.name, beside, n=1):
        return f"did you mean {path.parent / near[0]}?"
    if not path.is_absolute() and len(path.parts) == 2:
        return "for a model of the hub set model.hub and model.revision"
    return _NAME_A_MODEL


def tokenizer_of(settings: ModelSettings) -> Path | None:
    """The directory of a tokenizer that does not come with the weights."""
    if settings.tokenizer is None:
        return None
    path = Path(settings.tokenizer)
    if not path.is_dir():
        raise UsageError(f"model.tokenizer {path}: no such directory")
    return path.absolute()


def download(name: str, revision: str) -> Path:
    """A model of the hub as a directory of its cache."""
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            name, revision=revision, allow_patterns=list(_READ), ignore_patterns=list(_NOT_READ)
        )
    except Exception as error:  # no network, no such name, no access, ...
        raise UsageError(f"model.hub {name} at {revision}: {first_line(error)}") from error
    return Path(found)


def holds_adapters(directory: Path) -> bool:
    return (directory / _ADAPTERS).exists()


def base_of(adapters: Path) -> Path:
    """The directory of the model that adapters stand on, as they name it."""
    path = adapters / _ADAPTERS
    try:
        named: Any = json.loads(path.read_bytes())
        base, revision = named.get("base_model_name_or_path"), named.get("revision")
    except (OSError, ValueError, AttributeError) as error:
        raise BadFileError(path, f"cannot be read: {first_line(error)}") from error
    if isinstance(base, str) and Path(base).is_dir() and not adapters.samefile(base):
        return Path(base)
    if isinstance(base, str) and isinstance(revision, str) and COMMIT.fullmatch(revision):
        return download(base, revision)
    raise BadFileError(
        path,
        f"base_model_name_or_path is {base!r}, which is no directory here; write the directory of the base "
        "model there, or for a model of the hub also `revision` with the 40 digits of a commit",
    )


def refuse_pickles(directory: Path) -> None:
    """Say it before the loader does, which would only miss a file."""
    wanted = "adapter_model.safetensors" if holds_adapters(directory) else "model.safetensors"
    if any(directory.glob("*.safetensors")):
        return
    pickles = sorted(path.name for end in ("bin", "pt", "pth") for path in directory.glob(f"*.{end}"))
    if pickles:
        raise UsageError(
            f"model: {directory} has its weights as a pickle ({pickles[0]}), which could run anything; save "
            "them as safetensors: load them where you trust them, then save_pretrained"
        )
    raise UsageError(f"model: {directory} has no weights: {wanted} is not there")


def read_template(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UsageError(f"model.chat_template {path}: {why}") from None


def first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
