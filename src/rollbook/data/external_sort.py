"""Sort any number of rows by two numbers each, holding a fixed amount of them.

Rows are collected up to a budget, sorted and put aside as a run; the runs are then merged, as many at a time
as there may be open files. What fits into the budget never touches the disk.
"""

from __future__ import annotations

import contextlib
import heapq
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

BUDGET = 64 << 20
_OPEN_RUNS = 64
_BUFFER = 1 << 18
_ROW_OVERHEAD = 200  # of a tuple, two numbers and a bytes object
_HEAD = struct.Struct("<QQI")


class Keyed(NamedTuple):
    first: int
    second: int
    data: bytes


class ExternalSort:
    """`add` everything, then go through `ordered` once. The directory of its runs is the caller's."""

    def __init__(self, directory: Path, *, budget: int = BUDGET) -> None:
        self._directory, self._budget = directory, budget
        self._held: list[Keyed] = []
        self._held_bytes = 0
        self._runs: list[Path] = []
        self._made = 0

    def add(self, first: int, second: int, data: bytes) -> None:
        """Both numbers from 0 to 2**64 - 1; rows that share both come in the order of their bytes."""
        self._held.append(Keyed(first, second, data))
        self._held_bytes += len(data) + _ROW_OVERHEAD
        if self._held_bytes >= self._budget:
            self._runs.append(self._write(self._take_held()))

    def ordered(self) -> Iterator[Keyed]:
        last = self._take_held()
        if not self._runs:
            yield from last
            return
        if last:
            self._runs.append(self._write(last))
        while len(self._runs) > _OPEN_RUNS:
            group, self._runs = self._runs[:_OPEN_RUNS], self._runs[_OPEN_RUNS:]
            self._runs.append(self._write(_merged(group)))
        yield from _merged(self._runs)

    def _take_held(self) -> list[Keyed]:
        held, self._held, self._held_bytes = self._held, [], 0
        held.sort()
        return held

    def _write(self, rows: Iterator[Keyed] | list[Keyed]) -> Path:
        self._made += 1
        path = self._directory / f"run-{self._made}"
        with path.open("xb", buffering=_BUFFER) as file:
            for first, second, data in rows:
                file.write(_HEAD.pack(first, second, len(data)))
                file.write(data)
        return path


def shuffled(directory: Path, rows: Iterable[bytes], order: np.ndarray[Any, Any]) -> Iterator[bytes]:
    """The rows in another order: `order` says the place of each."""
    sort = ExternalSort(directory)
    for place, data in zip(order.tolist(), rows, strict=True):
        sort.add(place, 0, data)
    return (data for _, _, data in sort.ordered())


def _merged(paths: list[Path]) -> Iterator[Keyed]:
    with contextlib.ExitStack() as open_files:
        files = [open_files.enter_context(path.open("rb", buffering=_BUFFER)) for path in paths]
        yield from heapq.merge(*map(_read, files))
    for path in paths:
        path.unlink()


def _read(file: IO[bytes]) -> Iterator[Keyed]:
    while head := file.read(_HEAD.size):
        first, second, length = _HEAD.unpack(head)
        yield Keyed(first, second, file.read(length))
