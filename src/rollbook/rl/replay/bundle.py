"""A bundle: one micro-batch of a run and all that its step needs, in one zip file.

It is a run directory with one iteration, so whatever reads a run reads it when it is unpacked:

| file | what |
|---|---|
| `bundle.json` | which micro-batch of which run this is |
| `config.json`, `run.json`, `checkpoints.jsonl` | the settings of the step; versions; the weights below |
| `iterations.jsonl` | the one line, with what is expected: loss, gradient norm, digests, the machine |
| `train_iteration_NNNNNN_{transcripts,rollout_summaries}.jsonl` | the rollouts of the groups it is from |
| `token_exports/` | what is expected token by token |
| `checkpoints/NNNNNN/` | weights and optimiser before the step; of adapters the model below in `base/` |
| `COMPLETE` | the size and digest of each of these |

Who opens one need not trust who made it: names and sizes are checked before anything is read, and nothing in
it is code or can name code.
"""

from __future__ import annotations

import re
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from rollbook.errors import BadFileError, UsageError
from rollbook.records.archive import unpack
from rollbook.records.complete import COMPLETE, problem, read_mark
from rollbook.records.iterations import TrainRow
from rollbook.records.token_places import exported_steps
from rollbook.rl.replay.recorded import RecordedRun
from rollbook.train.losses import Loss

BUNDLE, BASE = "bundle.json", "base"
VERSION = 1
MOST_BYTES = 2 * 2**30  # a model of some hundred million parameters, with its optimiser
_MOST_FILES = 64
_NAMES = re.compile(
    r"COMPLETE|bundle\.json|config\.json|run\.json|iterations\.jsonl|checkpoints\.jsonl"
    r"|train_iteration_\d{6,}_(transcripts|rollout_summaries)\.jsonl"
    r"|token_exports/(manifest|rank_0)\.jsonl"
    r"|(checkpoints/\d{6,}|base)/([A-Za-z0-9_-]+(\.safetensors\.index)?\.(json|safetensors|jinja|txt|model)|COMPLETE)",
    re.ASCII,
)
# Keys with which the config of a model can name code, or packages, to be loaded.
_NAMES_CODE = ("auto_map", "quantization_config", "attn_implementation", "_attn_implementation")


class Bundle(msgspec.Struct, kw_only=True):
    """bundle.json."""

    version: int = VERSION
    run_id: str | None
    iteration: int
    optim_step: int  # within the iteration
    micro_batch: int  # within the iteration, in the order of training
    rows: list[TrainRow]


@contextmanager
def open_recorded(
    path: Path | str, *, loss: Loss | None = None, model: Path | str | None = None
) -> Iterator[RecordedRun]:
    """A run to be replayed: a directory, or a bundle, which is unpacked for as long as the block lasts."""
    path = Path(path).expanduser()
    if not path.is_file():
        yield RecordedRun(path, loss=loss, model=None if model is None else Path(model).absolute())
        return
    if not zipfile.is_zipfile(path):
        raise UsageError(f"{path} is neither a run directory nor a bundle")
    with tempfile.TemporaryDirectory(prefix="rollbook-bundle-") as temporary:
        root = Path(temporary) / "bundle"
        bundle = unpack_bundle(path, root)
        # What the settings say of the model leads elsewhere, and nothing in a bundle may.
        run = RecordedRun(root, loss=loss, model=root / BASE, only=frozenset(bundle.rows))
        _check_run(path, run, bundle)
        yield run


def unpack_bundle(path: Path, root: Path) -> Bundle:
    """Everything that is checked of a bundle, before any of it is used."""
    unpack(path, root, is_allowed=_is_allowed, most_bytes=MOST_BYTES, most_files=_MOST_FILES)
    if wrong := problem(root, verify=True):
        raise BadFileError(path, f"is not a whole bundle: {wrong.replace(str(root), '').lstrip('/ ')}")
    mark = read_mark(root)
    there = {file.relative_to(root).as_posix() for file in root.rglob("*") if file.is_file()}
    if mark is None or mark.files is None or there != {*mark.files, COMPLETE}:
        raise BadFileError(path, f"its {COMPLETE} does not name the files that are there")
    for config in sorted(root.rglob("*.json")):
        _refuse_code(path, root, config)
    try:
        bundle = msgspec.json.decode((root / BUNDLE).read_bytes(), type=Bundle)
    except (FileNotFoundError, msgspec.MsgspecError) as error:
        raise BadFileError(path, f"is not a bundle: {BUNDLE}: {error}") from None
    if bundle.version > VERSION:
        raise BadFileError(path, f"is of version {bundle.version}; open it with a newer Rollbook")
    return bundle


def _check_run(path: Path, run: RecordedRun, bundle: Bundle) -> None:
    """Nothing that is named in a bundle lies outside of it."""
    if run.info is not None:
        run.info.extra.clear()
    exports = [part.file for step in exported_steps(run.root, run.info) for part in step.ranks]
    if any(file not in (None, "rank_0.jsonl") for file in exports):
        raise BadFileError(path, "its token export names a file that is not in it")
    if run.iterations != [bundle.iteration] or run.record(bundle.iteration).processes != 1:
        raise BadFileError(path, f"does not hold one step of iteration {bundle.iteration}")
    checkpoint = run.files.checkpoint(f"{bundle.iteration:06d}")
    if run.origins()[-1].directory != checkpoint:
        raise BadFileError(path, "its weights are not where they should be")


def _is_allowed(name: str) -> bool:
    return _NAMES.fullmatch(name) is not None


def _refuse_code(path: Path, root: Path, config: Path) -> None:
    if config.name in ("tokenizer.json", "random_state.json"):  # large, and no configs
        return
    try:
        values = msgspec.json.decode(config.read_bytes())
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadFileError(path, f"{config.relative_to(root)} is not valid JSON: {error}") from None
    for key in _keys(values):
        if key in _NAMES_CODE:
            raise BadFileError(path, f"{config.relative_to(root)} has the key {key!r}, which can name code")


def _keys(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, below in value.items():
            yield key
            yield from _keys(below)
    elif isinstance(value, list):
        for item in value:
            yield from _keys(item)
