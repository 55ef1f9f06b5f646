"""What a collection was to do: the tasks of its input, each of which is a number from 0 on.

Tasks are looked up by a hash of their ids, so that a million rollouts are a few columns of numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from rollbook.audit.places import Ints
from rollbook.collect.input import hash_of, read_input
from rollbook.collect.input_rows import Agents
from rollbook.collect.manifest import Session
from rollbook.records.columns import Columns

Hashes = np.ndarray[Any, np.dtype[np.uint64]]


class Tasks(Protocol):
    """Who knows the tasks of a collection."""

    rows: int  # how many were planned

    def find(self, hashes: Hashes) -> Ints:
        """The number of each task; -1 where it was not planned."""
        ...


class InputTasks:
    """From the input."""

    def __init__(self, path: Path, session: Session) -> None:
        """Raises a UsageError if a row of it could not have been collected."""
        env = (session.meaning.get("agent") or {}).get("env") or {}
        columns = msgspec.convert(session.meaning.get("columns") or {}, Columns)
        limit = session.rows or None
        self._input = read_input(path, limit=limit, agents=Agents(env=env), columns=columns)
        self.rows, self.size = self._input.rows, self._input.size
        self.is_same = self._input.begins_with(session.input_bytes, session.input_sha256)

    def find(self, hashes: Hashes) -> Ints:
        return self._input.find(hashes)

    def task(self, row: int) -> str:
        done = np.ones((self.rows, 1), np.bool_)
        done[row] = False
        return next(self._input.items(1, done)).task_id


class UnknownTasks:
    """Where the input is gone: as many as the manifest says, and whatever is found is one of them."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._numbers: dict[int, int] = {}

    def find(self, hashes: Hashes) -> Ints:
        for task in hashes.tolist():
            if len(self._numbers) < self.rows:
                self._numbers.setdefault(task, len(self._numbers))
        return np.array([self._numbers.get(task, -1) for task in hashes.tolist()], np.int64)


def hashes_of(tasks: Sequence[str]) -> Hashes:
    return np.array([hash_of(task) for task in tasks], np.uint64)


def find_input(output: Path, session: Session) -> Path | None:
    """The file that was collected from: a relative path is that of the directory where it was typed."""
    if not session.input:
        return None
    named = Path(session.input)
    places = (named, output.parent / named, output.parent / named.name)
    return next((place for place in places if place.is_file()), None)
