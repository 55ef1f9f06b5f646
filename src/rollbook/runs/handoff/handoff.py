"""A finished run hands its result to the next one through `runtime_info.output` of its config file.

Only that block changes, every other byte of the file stays (see `yaml_block`). The file is read again under
a lock, because a person may have edited it during a long run, and replaced whole, so nobody ever reads half
of it. A result that cannot be published safely is written beside the run, and the answer says why and what
to do; `publish` never fails a run that has succeeded.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Mapping
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import yaml
from msgspec import UNSET, UnsetType

from rollbook.errors import BadFileError, RollbookError, WriteError
from rollbook.records.atomic import write_atomic
from rollbook.records.locks import FileLock
from rollbook.runs.handoff.yaml_block import BlockError, Scalar, Tree, block_text, is_declaration, set_block

OUTPUT = ("runtime_info", "output")
METRICS = ("final_loss", "train_runtime", "total_steps", "last_loss", "mean_loss", "final_reward")
ARTIFACTS = ("train_results", "train_loss_plot", "training_log")

_LOCK_TIMEOUT_S = 30.0
_EDITS_TOLERATED = 5


class HandoffOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What a run publishes. `None` is unknown: it clears what an earlier run left and adds nothing."""

    checkpoint_path: Path | None = None
    final_loss: float | None = None  # the mean over the run, as that name is used in this ecosystem
    train_runtime: float | None = None  # seconds
    total_steps: int | None = None
    last_loss: float | None = None
    mean_loss: float | None = None
    final_reward: float | None = None  # the mean reward of the last training iteration
    train_results: Path | None = None
    train_loss_plot: Path | None = None
    training_log: Path | None = None
    training_curves: str | None = None  # a tracker's run id; `null` says that no tracker was used


class HandoffState(StrEnum):
    WRITTEN = "written"
    UNCHANGED = "unchanged"
    ASIDE = "aside"  # the config was left alone


class HandoffResult(msgspec.Struct, frozen=True, kw_only=True):
    state: HandoffState
    config: Path
    reason: str = ""
    next_step: str = ""
    fallback: Path | None = None  # where the block was written instead
    block: str = ""  # the block itself, when it is not in the config

    @property
    def published(self) -> bool:
        return self.state is not HandoffState.ASIDE


def publish(
    config_path: Path,
    output: HandoffOutput,
    *,
    fallback: Path,
    lock_timeout_s: float = _LOCK_TIMEOUT_S,
    retry: str = "rollbook promote RUN",
) -> HandoffResult:
    """Write the output block into the config, or into `fallback` when that is not safe."""
    try:
        target = _regular_file(config_path)
        with FileLock(target, wait_s=lock_timeout_s):
            changed = _commit(target, output)
    except BlockError as error:
        return _set_aside(config_path, output, fallback, f"{config_path}: {error}", retry)
    except (RollbookError, OSError) as error:
        return _set_aside(config_path, output, fallback, str(error), retry)
    state = HandoffState.WRITTEN if changed else HandoffState.UNCHANGED
    return HandoffResult(state=state, config=config_path)


def _regular_file(config_path: Path) -> Path:
    target = _real(config_path)
    try:
        mode = target.stat().st_mode
    except OSError as error:
        raise BadFileError(config_path, f"cannot be read ({error.strerror})") from error
    if not stat.S_ISREG(mode):
        raise BadFileError(config_path, "is not a regular file")
    if not mode & 0o222:
        raise BadFileError(config_path, f"is read-only (chmod u+w {config_path} to allow writing)")
    return target


def _commit(target: Path, output: HandoffOutput) -> bool:
    """Whether the file had to change. An editor does not take our lock: a save that came between is kept."""
    for _ in range(_EDITS_TOLERATED):
        before = target.read_bytes()
        after = _with_block(before, output, target.parent)
        if after == before:
            return False
        if target.read_bytes() == before:
            write_atomic(target, after)
            return True
    raise WriteError(f"{target}: another program keeps saving it")


def _with_block(before: bytes, output: HandoffOutput, directory: Path) -> bytes:
    try:
        text = before.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BlockError("not UTF-8", line=before.count(b"\n", 0, error.start) + 1) from error
    return set_block(text, OUTPUT, _values(output, directory)).encode("utf-8")


def _values(output: HandoffOutput, directory: Path) -> Tree:
    def known(value: float | str | Path | None) -> Scalar | UnsetType:
        if value is None:
            return UNSET
        return path_from(directory, value) if isinstance(value, Path) else value

    return {
        "checkpoint_path": known(output.checkpoint_path),
        "training_metrics": {name: known(getattr(output, name)) for name in METRICS},
        "artifacts": {name: known(getattr(output, name)) for name in ARTIFACTS},
        "training_curves": output.training_curves,
    }


def path_from(directory: Path, path: Path) -> str:
    """`path` as seen from the (real) directory: relative, `/` between names, `..` where it must be.

    Symlinks below the shared directory keep their names; absolute when only the root is shared.
    """
    absolute = path.absolute()
    if ".." in absolute.parts:
        absolute = _real(absolute)
    named = {_real(ancestor): ancestor for ancestor in reversed([absolute, *absolute.parents])}
    shared = next(ancestor for ancestor in [directory, *directory.parents] if ancestor in named)
    if shared == shared.parent != directory:
        return absolute.as_posix()
    up = [".."] * (len(directory.parts) - len(shared.parts))
    return PurePosixPath(*up, *absolute.relative_to(named[shared]).parts).as_posix()


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))  # unlike resolve(), it does not raise on a symlink loop


def _set_aside(
    config_path: Path, output: HandoffOutput, fallback: Path, reason: str, retry: str
) -> HandoffResult:
    values = _values(output, _real(config_path).parent)
    block = block_text({OUTPUT[0]: {OUTPUT[1]: values}}) + "\n"
    header = [f"Not written into {config_path}:", reason, f"Fix it, then type: {retry}"]
    comment = "".join(f"# {_one_line(line)}\n" for line in header)
    kept: Path | None = fallback
    next_step = f"copy the block of {fallback} into {config_path} by hand, or fix that file and type: {retry}"
    try:
        write_atomic(fallback, (comment + block).encode("utf-8"))
    except (RollbookError, OSError) as error:
        kept, reason = None, f"{reason}; and {error}"
        next_step = f"fix {config_path} and type: {retry}"
    return HandoffResult(
        state=HandoffState.ASIDE,
        config=config_path,
        reason=reason,
        next_step=next_step,
        fallback=kept,
        block=block,
    )


def _one_line(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in " ".join(text.split()))


def read_handoff(config_path: Path) -> dict[str, Any]:
    """The output block of a config, each output as its plain value: `value`, else `path`, else what it is."""
    block = _read_block(config_path)
    leaves = {"training_metrics": METRICS, "artifacts": ARTIFACTS}
    return {str(name): _plain_output(value, leaves.get(name, ())) for name, value in block.items()}


def resolve_checkpoint(config_path: Path) -> Path:
    """The checkpoint a config hands on, as an existing absolute path."""
    key = ".".join((*OUTPUT, "checkpoint_path"))
    block = read_handoff(config_path)
    first = _first(config_path)
    if "checkpoint_path" not in block:
        raise BadFileError(config_path, f"{key} is missing; {first}")
    written = block["checkpoint_path"]
    if written is None:
        raise BadFileError(config_path, f"{key} is null; {first}")
    if not isinstance(written, str):
        raise BadFileError(config_path, f"{key} is {written!r}, not a path")
    path = _real(config_path).parent / written
    path = _real(path) if ".." in path.parts else path
    if not path.exists():
        raise BadFileError(config_path, f"{key} is {written!r}, but {path} does not exist; {first}")
    return path


def _first(config_path: Path) -> str:
    return f"run `rollbook sft {config_path}` first, or publish a checkpoint with `rollbook promote`"


def _plain_output(value: Any, leaves: Collection[str]) -> Any:
    if isinstance(value, Mapping):
        if is_declaration(value, leaves):
            held = value.get("value")
            return _plain_output(value.get("path") if held in (None, "") else held, leaves)
        if leaves:
            return {name: _plain_output(leaf, ()) for name, leaf in value.items()}
    return None if value == "" else value


def _read_block(config_path: Path) -> dict[Any, Any]:
    """Only the block is constructed, so dates and tags elsewhere in the file cannot be in the way."""
    try:
        loader = yaml.SafeLoader(config_path.read_bytes().decode("utf-8"))
        node = loader.get_single_node()
        for depth, key in enumerate(OUTPUT):
            node = _value_node(loader, node, key)
            if node is None:
                raise BadFileError(
                    config_path, f"{'.'.join(OUTPUT[: depth + 1])} is missing; {_first(config_path)}"
                )
        _refuse_twice(node, "checkpoint_path")
        block = loader.construct_document(node)
    except OSError as error:
        raise BadFileError(config_path, f"cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise BadFileError(config_path, f"not readable as YAML: {_one_line(str(error))}") from error
    if block is None:
        return {}
    if not isinstance(block, dict):
        raise BadFileError(config_path, f"{'.'.join(OUTPUT)} is a {type(block).__name__}, not a mapping")
    return block


def _value_node(loader: yaml.SafeLoader, node: yaml.Node | None, key: str) -> yaml.Node | None:
    if not isinstance(node, yaml.MappingNode):
        return None
    _refuse_twice(node, key)
    found = [value for name, value in node.value if name.value == key]
    if not found:
        loader.flatten_mapping(node)  # the key may come from a merge
        found = [value for name, value in node.value if name.value == key]
    return found[-1] if found else None


def _refuse_twice(node: yaml.Node | None, key: str) -> None:
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    lines = [str(name.start_mark.line + 1) for name, _ in pairs if name.value == key]
    if len(lines) > 1:
        raise yaml.YAMLError(f"{key!r} is there twice (lines {' and '.join(lines)}); keep one")
