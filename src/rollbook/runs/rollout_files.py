"""The two files of one iteration's rollouts, and where each rollout is in them.

Lines are appended as rollouts finish. When the iteration closes, they are put in the order of the batch, so
that the order in which rollouts happened to finish leaves no trace. What is kept per rollout is four numbers.
"""

from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from io import RawIOBase
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from rollbook.records.atomic import replacing
from rollbook.records.jsonl import JsonlWriter
from rollbook.records.locks import FileLock


class Place(NamedTuple):
    """The byte ranges of one rollout's two lines."""

    summary: tuple[int, int]
    transcript: tuple[int, int]


class RolloutFiles:
    def __init__(self, summaries: Path, transcripts: Path, lock: FileLock) -> None:
        self._paths = (summaries, transcripts)
        self._guard = threading.Lock()
        self._groups, self._trajectories = array("q"), array("q")
        self._ends = (array("q"), array("q"))  # of each line, in the order of the file
        with ExitStack() as undo:
            self._writers = [
                undo.enter_context(JsonlWriter(path, lock=lock)) for path in (summaries, transcripts)
            ]
            self._opened = undo.pop_all()

    def append(self, group_idx: int, traj_idx: int, summary: bytes, transcript: bytes) -> None:
        with self._guard:
            # The transcript first: a summary is never without its text.
            transcript_end = self._writers[1].append(transcript)
            summary_end = self._writers[0].append(summary)
            self._groups.append(group_idx)
            self._trajectories.append(traj_idx)
            self._ends[0].append(summary_end)
            self._ends[1].append(transcript_end)

    def sync(self) -> None:
        for writer in reversed(self._writers):
            writer.sync()

    def close(self) -> None:
        """Close both files, their lines in order."""
        self._opened.close()
        keys = list(zip(self._groups, self._trajectories, strict=True))
        order = sorted(range(len(keys)), key=keys.__getitem__)
        if order == list(range(len(keys))):
            return
        for path, ends in zip(self._paths, self._ends, strict=True):
            spans = [_span(ends, index) for index in order]
            with path.open("rb", buffering=0) as source, replacing(path) as target:
                end = 0
                for place, (start, stop) in enumerate(spans):
                    target.write(_read(source, start, stop))
                    end += stop - start
                    ends[place] = end
        self._groups = array("q", [self._groups[index] for index in order])
        self._trajectories = array("q", [self._trajectories[index] for index in order])

    def groups(self) -> Iterator[tuple[int, list[Place]]]:
        """Every group with the places of its rollouts, in order; after `close`."""
        for group_idx, members in groupby(range(len(self._groups)), self._groups.__getitem__):
            yield group_idx, [Place(_span(self._ends[0], i), _span(self._ends[1], i)) for i in members]

    @contextmanager
    def reading(self) -> Iterator[RolloutReader]:
        summaries, transcripts = self._paths
        with summaries.open("rb", buffering=0) as first, transcripts.open("rb", buffering=0) as second:
            yield RolloutReader(self, first, second)


class RolloutReader:
    """Reads the lines of closed files by their places."""

    def __init__(self, files: RolloutFiles, summaries: RawIOBase, transcripts: RawIOBase) -> None:
        self.groups = files.groups
        self._summaries, self._transcripts = summaries, transcripts

    def summary(self, place: Place) -> dict[str, Any]:
        line: dict[str, Any] = orjson.loads(_read(self._summaries, *place.summary))
        return line

    def transcript(self, place: Place) -> dict[str, Any]:
        line: dict[str, Any] = orjson.loads(_read(self._transcripts, *place.transcript))
        return line


def _span(ends: array[int], index: int) -> tuple[int, int]:
    return (ends[index - 1] if index else 0), ends[index]


def _read(file: RawIOBase, start: int, end: int) -> bytes:
    return os.pread(file.fileno(), end - start, start)
