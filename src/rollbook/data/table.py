"""A narrow table of a dataset: a few numbers a rollout, by task, however many there are.

Repeats of a task stand anywhere in a file, since results are written as they complete. To bring them together
without holding the rows, one pass puts who each row is and what it earned into DuckDB, which spills to the
disk; a question to the table then names the rows that matter, and a second pass picks those.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import numpy as np

from rollbook.data.columns import column, insert
from rollbook.data.rollouts import input_tokens_of, is_truncated, output_tokens_of, reward_of
from rollbook.records.row_keys import TASK_INDEX, repeat_of, task_of
from rollbook.records.rows import Row

Note = Callable[[str, dict[str, Any]], None]  # told the task and the value of a row

_BATCH = 20_000
_COLUMNS: dict[str, type] = {
    "row": int,  # its number in the dataset, from 0, over all inputs
    "task": str,
    "repeat": int,
    "task_index": int,
    "reward": float,
    "input_tokens": int,
    "output_tokens": int,
    "truncated": bool,
}
_SQL_TYPES = {int: "bigint", str: "varchar", float: "double", bool: "boolean"}


class RolloutTable:
    """Use as a context manager."""

    def __init__(self, rows: Iterable[Row], directory: Path, note: Note | None = None) -> None:
        """What does not fit into memory goes to the directory; `note` is shown every row on the way."""
        self._note = note
        self._connection = duckdb.connect(":memory:")
        self._connection.execute("set enable_progress_bar = false")  # it would draw into our output
        self._connection.execute("set memory_limit = '512MB'")
        self._connection.execute("set temp_directory = ?", [str(directory)])
        columns = ", ".join(f'"{name}" {_SQL_TYPES[kind]}' for name, kind in _COLUMNS.items())
        self._connection.execute(f"create table rollouts ({columns})")
        try:
            self._fill(rows)
        except BaseException:
            self.close()
            raise

    def ask(self, question: str, parameters: list[Any] | None = None) -> Iterator[tuple[Any, ...]]:
        cursor = self._connection.cursor().execute(question, parameters or [])
        while chunk := cursor.fetchmany(_BATCH):
            yield from chunk

    def one(self, question: str, parameters: list[Any] | None = None) -> tuple[Any, ...]:
        return next(self.ask(question, parameters))

    def row_numbers(self, question: str, parameters: list[Any] | None = None) -> np.ndarray[Any, Any]:
        """The first column of an answer, sorted, for `pick`."""
        column = self._connection.cursor().execute(question, parameters or []).fetchnumpy()
        (numbers,) = column.values()
        return np.sort(np.asarray(numbers, dtype=np.int64))

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> RolloutTable:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fill(self, rows: Iterable[Row]) -> None:
        columns: list[list[Any]] = [[] for _ in _COLUMNS]
        for number, row in enumerate(rows):
            value = row.value()
            line = _line(number, value)
            if self._note is not None:
                self._note(line.task, value)
            for values, cell in zip(columns, line, strict=True):
                values.append(cell)
            if len(columns[0]) == _BATCH:
                self._insert(columns)
                columns = [[] for _ in _COLUMNS]
        self._insert(columns)

    def _insert(self, columns: list[list[Any]]) -> None:
        kinds = zip(_COLUMNS.items(), columns, strict=True)
        insert(self._connection, "rollouts", {name: column(values, kind) for (name, kind), values in kinds})


def pick(rows: Iterable[Row], numbers: np.ndarray[Any, Any]) -> Iterator[tuple[int, Row]]:
    """The rows of these numbers, which must be sorted, in one pass."""
    wanted = iter(numbers.tolist())
    following = next(wanted, None)
    for number, row in enumerate(rows):
        if number == following:
            yield number, row
            following = next(wanted, None)


class Spool:
    """Chosen rows kept on the disk, to be taken out in any order."""

    def __init__(self, directory: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115
        self._places: dict[int, tuple[int, int, Path, int]] = {}

    def put(self, number: int, row: Row) -> None:
        self._places[number] = (self._file.seek(0, 2), len(row.data), row.path, row.number)
        self._file.write(row.data)

    def take(self, number: int) -> Row:
        start, size, path, line = self._places[number]
        self._file.seek(start)
        return Row(self._file.read(size), path, line)

    def close(self) -> None:
        self._file.close()


class _Line(NamedTuple):
    """As in the schema."""

    row: int
    task: str
    repeat: int | None
    task_index: int | None
    reward: float | None
    input_tokens: int | None
    output_tokens: int | None
    truncated: bool


def _line(number: int, value: dict[str, Any]) -> _Line:
    index = value.get(TASK_INDEX)
    is_index = isinstance(index, int) and not isinstance(index, bool) and abs(index) < 1 << 63
    return _Line(
        row=number,
        task=task_of(value),
        repeat=repeat_of(value),
        task_index=index if is_index else None,
        reward=reward_of(value),
        input_tokens=input_tokens_of(value),
        output_tokens=output_tokens_of(value),
        truncated=is_truncated(value),
    )
