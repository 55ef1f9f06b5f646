"""What a collection was to do: the rows of its input, and how often each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rollbook.audit.places import Ints
from rollbook.collect.input import Agents, hash_of, read_input
from rollbook.collect.manifest import Session


class Planned:
    def __init__(self, path: Path, session: Session) -> None:
        """Raises a UsageError if a row of it could not have been collected."""
        env = (session.meaning.get("agent") or {}).get("env") or {}
        self._input = read_input(path, limit=session.rows or None, agents=Agents(env=env))
        self.rows, self.repeats, self.size = self._input.rows, session.repeats, self._input.size
        self.is_same = self._input.begins_with(session.input_bytes, session.input_sha256)

    def rows_of(self, tasks: Sequence[str]) -> Ints:
        """The row of each task; -1 where the input has none of that id."""
        return self._input.find(np.array([hash_of(task) for task in tasks], np.uint64))

    def task(self, row: int) -> str:
        done = np.ones((self.rows, 1), np.bool_)
        done[row] = False
        return next(self._input.items(1, done)).task_id


def find_input(output: Path, session: Session) -> Path | None:
    """The file that was collected from: a relative path is that of the directory where it was typed."""
    if not session.input:
        return None
    named = Path(session.input)
    places = (named, output.parent / named, output.parent / named.name)
    return next((place for place in places if place.is_file()), None)
