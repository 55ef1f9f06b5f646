"""A file that a newer rollbook wrote: refused by its name, and never read as a wrong number."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from collecting import config, run, small_input
from rollbook import open_run
from rollbook.errors import BadFileError, BadLineError
from rollbook.records import logtree
from rollbook.records.datasets import read_manifest
from rollbook.records.token_files import read_manifest as read_export

WHY = (
    "has schema_version 99, made by a newer rollbook; this one knows {}: upgrade it, with "
    "pip install --upgrade rollbook"
)


def from_the_future(path: Path) -> Path:
    """The last line of a file of lines, or the whole, with another version."""
    *others, last = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    newer = json.dumps({**json.loads(last), "schema_version": 99})
    path.write_text("\n".join([*others, newer]) + "\n")
    return path


@pytest.fixture
def copy(sample_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sample_run, tmp_path / "run"))


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "run.json": ("run.json", lambda root: open_run(root).info),
    "rollouts": ("train_iteration_*_rollout_summaries.jsonl", lambda root: list(open_run(root).rollouts())),
    "transcripts": ("train_iteration_*_transcripts.jsonl", lambda root: list(open_run(root).transcripts())),
    "iterations": ("iterations.jsonl", lambda root: list(open_run(root).finished_iterations())),
    "checkpoints": ("checkpoints.jsonl", lambda root: list(open_run(root).checkpoints())),
    "logtree": (
        "train_iteration_*_logtree.json",
        lambda root: logtree.read(first(root, "train_*.json")),
    ),
}


def first(root: Path, pattern: str) -> Path:
    return sorted(root.glob(pattern))[0]


@pytest.mark.parametrize("kind", READERS)
def test_a_file_of_a_run(kind: str, copy: Path) -> None:
    pattern, read = READERS[kind]
    path = from_the_future(first(copy, pattern))
    with pytest.raises((BadFileError, BadLineError)) as caught:
        read(copy)
    assert str(caught.value).startswith(str(path))
    assert WHY.format(1) in str(caught.value)


def test_the_manifest_of_a_collection(tmp_path: Path) -> None:
    small_input(tmp_path, 2)
    config(tmp_path)
    run(tmp_path, "limit=1")
    path = from_the_future(first(tmp_path, "*_manifest.json"))
    before = path.read_bytes()
    for read in (lambda: run(tmp_path), lambda: read_manifest(tmp_path / "out.jsonl")):
        with pytest.raises(BadFileError) as caught:
            read()
        assert str(caught.value).startswith(str(path)) and "made by a newer rollbook" in str(caught.value)
    assert path.read_bytes() == before


def test_the_manifest_of_a_token_export(tmp_path: Path) -> None:
    path = tmp_path / "manifest.jsonl"
    path.write_text('{"schema_version": 99}\n')
    with pytest.raises((BadFileError, BadLineError)) as caught:
        list(read_export(path))
    assert str(caught.value) == f"{path}:1: {WHY.format(1)}"
