"""A few numbers of every row in one DuckDB table, without parsing whole rows in Python.

DuckDB reads only the wanted fields, on all cores. It gives up at what it does not take (a field that is an
object here and a text there, a key twice in a row, a line that is no JSON); then every row is read by our
own reader, slower, which takes all that is valid and names file and line of what is not. So are rows that do
not say whose they are: a name made of what was asked is that reader's to give. Both fill the same table.

A field holds its number (`numbers.py` says what is one); null where it is missing; NaN where it is there and
none.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import duckdb

from rollbook.data.expression import value_at
from rollbook.records.numbers import as_number, sql_number
from rollbook.records.row_keys import KEY, PROMPTS, TASK_INDEX, task_of
from rollbook.records.rows import Progress, Row, read_rows

Field = list[str | int]

_BATCH = 10_000
_THREADS = 8  # each holds two buffers of 16 MB
_GLOB = frozenset("*?[")
_NAMES = (KEY, "task_id", TASK_INDEX, "id")
_STOP = "stop_reason"
# Who the row is, as `task_of` says: names are texts or whole numbers.
_NAMED = (
    """case when left({0}, 1) = '"' then {0}->>'$' when regexp_full_match({0}, '-?[0-9]+') then {0} end"""
)


class NumberTable:
    """The table `numbers`: columns f0, f1, ... for the fields, `task` (a hash) and `stop`."""

    def __init__(self, fields: Sequence[Field], *, memory: str = "1GB") -> None:
        self._fields = fields
        self._directory = tempfile.TemporaryDirectory(prefix="rollbook-stats-")
        self._connection = duckdb.connect()
        self._connection.execute("set enable_progress_bar = false")  # it would draw into our output
        self._connection.execute(f"set memory_limit = '{memory}'")
        self._connection.execute("set temp_directory = ?", [self._directory.name])
        self._connection.execute(f"set threads = {min(_THREADS, os.cpu_count() or 1)}")
        self._connection.execute("set preserve_insertion_order = false")

    def fill(self, paths: Sequence[Path], advance: Progress) -> bool:
        """True where DuckDB read it all."""
        if all(map(_begins_with_a_name, paths)):
            with suppress(duckdb.Error, _NotForDuckDB):
                self._create()
                for path in paths:
                    self._insert_by_duckdb(path)
                    advance(path.stat().st_size)
                if self.ask("select count(*) from numbers where task is null") == [(0,)]:
                    return True
                advance = _unheard
        self._create()
        for path in paths:
            self._insert_rows(path, advance)
        return False

    def ask(self, question: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return self._connection.execute(question, list(parameters)).fetchall()

    def __enter__(self) -> NumberTable:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()
        self._directory.cleanup()

    def _create(self) -> None:
        columns = "".join(f"f{place} double, " for place in range(len(self._fields)))
        self._connection.execute(f"create or replace table numbers ({columns}task ubigint, stop varchar)")

    def _insert_by_duckdb(self, path: Path) -> None:
        if _GLOB & set(str(path)):
            raise _NotForDuckDB
        source = self._parquet(path) if path.suffix == ".parquet" else self._json(path)
        names = [_NAMED.format(f"{_quoted(name)}::varchar") for name in _NAMES]
        names[0] = f"regexp_replace({names[0]}, '#[0-9]+$', '')"
        names[2] = f"'index-' || {names[2]}"
        chosen = [sql_number(self._text_of(field)) for field in self._fields]
        chosen += [_hashed(f"coalesce({', '.join(names)})"), f"{_quoted(_STOP)}->>'$'"]
        self._connection.execute(f"insert into numbers select {', '.join(chosen)} from {source}")

    def _json(self, path: Path) -> str:
        columns = ", ".join(f"{_text(name)}: {_text(kind)}" for name, kind in self._columns().items())
        return (
            f"read_json({_text(str(path))}, format = 'newline_delimited', records = true,"
            f" columns = {{{columns}}})"
        )

    def _parquet(self, path: Path) -> str:
        file = f"read_parquet({_text(str(path))})"
        there = {name for name, *_ in self.ask(f"describe select * from {file}")}
        columns = ", ".join(
            f"{f'to_json({_quoted(name)})' if name in there else 'null::json'} as {_quoted(name)}"
            for name in self._columns()
        )
        # Structs become JSON, so every field is found in it by its path.
        return f"(select {columns} from {file})"

    def _columns(self) -> dict[str, str]:
        """The columns to read: JSON, or a struct with JSON at its ends where only parts are wanted."""
        columns = dict.fromkeys((*_NAMES, _STOP), "JSON")
        trees: dict[str, Any] = {}
        for field in self._fields:
            head = str(field[0])
            if head not in columns:
                trees.setdefault(head, []).append(field[1:])
        return columns | {head: _struct(ends) for head, ends in trees.items()}

    def _text_of(self, field: Field) -> str:
        head, *rest = field
        column = _quoted(str(head))
        if self._columns()[str(head)] == "JSON":
            return f"({column}->{_text(_pointer(rest))})::varchar" if rest else f"{column}::varchar"
        return ".".join([column, *(_quoted(str(step)) for step in rest)]) + "::varchar"

    def _insert_rows(self, path: Path, advance: Progress) -> None:
        columns: list[list[Any]] = [[] for _ in range(len(self._fields) + 2)]
        for row in read_rows(path, progress=advance):
            for column, value in zip(columns, self._line(row), strict=True):
                column.append(value)
            if len(columns[0]) == _BATCH:
                self._insert(columns)
                columns = [[] for _ in columns]
        self._insert(columns)

    def _line(self, row: Row) -> list[Any]:
        value = row.value()
        stop = value.get(_STOP)
        numbers = [_as_number(value_at(value, field)) for field in self._fields]
        is_known = any(value.get(name) is not None for name in (*_NAMES, *PROMPTS))
        return [*numbers, task_of(value) if is_known else None, None if stop is None else str(stop)]

    def _insert(self, columns: list[list[Any]]) -> None:
        import pyarrow as pa  # a fifth of a second that most files can do without

        kinds = [*([pa.float64()] * len(self._fields)), pa.string(), pa.string()]
        names = [*(f"f{place}" for place in range(len(self._fields))), "task", "stop"]
        arrays = [pa.array(column, kind) for column, kind in zip(columns, kinds, strict=True)]
        self._connection.register("batch", pa.Table.from_arrays(arrays, names))
        numbers = "".join(f"f{place}, " for place in range(len(self._fields)))
        self._connection.execute(f"insert into numbers select {numbers}{_hashed('task')}, stop from batch")
        self._connection.unregister("batch")


class _NotForDuckDB(Exception):
    """A name or a path that DuckDB would read as something else."""


def _begins_with_a_name(path: Path) -> bool:
    first = next(read_rows(path), None)
    return first is None or any(first.value().get(name) is not None for name in _NAMES)


def _unheard(_: int) -> None:
    """What is read again is no progress."""


def _as_number(value: Any) -> float | None:
    if value is None:
        return None
    number = as_number(value)
    return math.nan if number is None else number


def _hashed(text: str) -> str:
    return f"case when {text} is not null then hash({text}) end"


def _struct(ends: Iterable[Field]) -> str:
    """The type that holds only these ends; JSON where one goes through a list or is the start of another."""
    tree: dict[str, Any] = {}
    for end in ends:
        if not end or any(isinstance(step, int) for step in end):
            return "JSON"
        tree.setdefault(str(end[0]), []).append(end[1:])
    inner = {name: "JSON" if rest == [[]] else _struct(rest) for name, rest in tree.items()}
    if any(kind == "JSON" and tree[name] != [[]] for name, kind in inner.items()):
        return "JSON"
    return f"STRUCT({', '.join(f'{_quoted(name)} {kind}' for name, kind in inner.items())})"


def _pointer(steps: Field) -> str:
    if any(isinstance(step, int) and step < 0 for step in steps):
        raise _NotForDuckDB
    return "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in steps)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"
