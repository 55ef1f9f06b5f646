"""The name of every file of a run directory is made here and nowhere else.

Two layouts hold the same files. `flat` is the documented one (`train_iteration_000010.html`); `nested`
keeps one directory per iteration (`iteration_000010/train.html`), which newer Tinker tools read. A reader
accepts both, even mixed in one directory.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from rollbook.errors import UsageError

TRAIN = "train"
INDEX_YAML = "index.yaml"  # of an artifacts directory: the history of all runs
_EVAL_PREFIX = "eval/"


class Layout(StrEnum):
    FLAT = "flat"
    NESTED = "nested"


class Artifact(StrEnum):
    """The files of one (split, iteration); the value is the end of the file's name."""

    HTML = ".html"
    LOGTREE = "_logtree.json"
    SUMMARIES = "_rollout_summaries.jsonl"
    TRANSCRIPTS = "_transcripts.jsonl"


_SUFFIXES = "|".join(re.escape(artifact) for artifact in Artifact)
_FLAT_NAME = re.compile(rf"(train|eval_.*)_iteration_(\d{{6,}})({_SUFFIXES})", re.DOTALL)
_NESTED_NAME = re.compile(rf"(train|eval_.*?)({_SUFFIXES})", re.DOTALL)
_RANK_0 = re.compile(r"rank_0(?!\d)")
_NESTED_DIRECTORY = re.compile(r"iteration_(\d{6,})")


def is_iteration_file(name: str) -> bool:
    """Whether this path below a run's directory is that of a file of one iteration."""
    directory, _, last = name.rpartition("/")
    if directory:
        return bool(_NESTED_DIRECTORY.fullmatch(directory) and _NESTED_NAME.fullmatch(last))
    return _FLAT_NAME.fullmatch(name) is not None


def eval_split(name: str) -> str:
    """The split of an evaluator, as in records: `eval/<name>`."""
    return f"{_EVAL_PREFIX}{name}"


def sanitize(name: str) -> str:
    """An evaluator's name as part of a file name: `my eval/(v1)!` becomes `my_eval_v1`."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", name).strip("._") or "unnamed"


def base_name(split: str) -> str:
    if split == TRAIN:
        return TRAIN
    if split.startswith(_EVAL_PREFIX):
        return f"eval_{sanitize(split.removeprefix(_EVAL_PREFIX))}"
    raise UsageError(f"split {split!r} is neither 'train' nor 'eval/<name>'")


@dataclass(frozen=True)
class IterationFile:
    """One file of one (split, iteration), found on disk."""

    path: Path
    base: str  # `train` or `eval_<name>`
    iteration: int
    artifact: Artifact

    @property
    def split(self) -> str:
        return TRAIN if self.base == TRAIN else eval_split(self.base.removeprefix("eval_"))


@dataclass(frozen=True)
class RunFiles:
    """The paths of one run directory."""

    root: Path
    layout: Layout = Layout.FLAT

    @property
    def run(self) -> Path:
        return self.root / "run.json"

    @property
    def config(self) -> Path:
        return self.root / "config.json"

    @property
    def code_diff(self) -> Path:
        return self.root / "code.diff"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints.jsonl"

    @property
    def alerts(self) -> Path:
        return self.root / "alerts.jsonl"

    @property
    def iterations(self) -> Path:
        return self.root / "iterations.jsonl"

    @property
    def superseded(self) -> Path:
        return self.root / "superseded"

    @property
    def checkpoint_root(self) -> Path:
        return self.root / "checkpoints"

    def checkpoint(self, name: str) -> Path:
        if sanitize(name) != name:
            raise UsageError(f"checkpoint name {name!r} is not a file name; try {sanitize(name)!r}")
        return self.checkpoint_root / name

    def iteration(self, split: str, iteration: int, artifact: Artifact) -> Path:
        if iteration < 0:
            raise UsageError(f"iteration {iteration} is negative")
        base = base_name(split)
        if self.layout is Layout.NESTED:
            return self.root / f"iteration_{iteration:06d}" / f"{base}{artifact}"
        return self.root / f"{base}_iteration_{iteration:06d}{artifact}"

    def log_family(self, name: str) -> list[Path]:
        """The files on disk of a log: itself, and of one named for `rank_0` those of the other ranks."""
        path = self.root / name
        pattern = _RANK_0.sub("rank_*", glob.escape(path.name))
        return sorted(found for found in path.parent.glob(pattern) if found.is_file())

    def iteration_files(self) -> Iterator[IterationFile]:
        """Every per-iteration file on disk, of either layout, in no order."""
        for entry in self.root.iterdir():
            if match := _FLAT_NAME.fullmatch(entry.name):
                base, number, suffix = match.groups()
                yield IterationFile(entry, base, int(number), Artifact(suffix))
            elif (match := _NESTED_DIRECTORY.fullmatch(entry.name)) and entry.is_dir():
                yield from _nested_files(entry, int(match[1]))


def _nested_files(directory: Path, iteration: int) -> Iterator[IterationFile]:
    try:
        entries = list(directory.iterdir())
    except FileNotFoundError:  # a resume emptied and removed it since it was listed
        return
    for entry in entries:
        if match := _NESTED_NAME.fullmatch(entry.name):
            yield IterationFile(entry, match[1], iteration, Artifact(match[2]))
