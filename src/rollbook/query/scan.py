"""Files as the records of a FROM clause: `row` (the exact text of a line), its `filename` and `_iteration`.

DuckDB hands on each line byte for byte: long numbers, the order of keys and escapes stay as they are. Files
are read in the order in which they are given, which `preserve_insertion_order` keeps up to the result. The
name of an iteration's file says its number, and a filter on it then skips all other files.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from rollbook.query.sql import literal
from rollbook.records.rows import duckdb_pattern, parquet_source
from rollbook.runs.resolve import DataFile

FILE = "filename"  # only under this name does a filter on it skip files unread
ROW = "row"
MACROS = r"""
CREATE MACRO _string(value) AS CASE WHEN left(value::VARCHAR, 1) = '"' THEN value->>'$' END;
CREATE MACRO _whole(value) AS CASE WHEN regexp_full_match(value::VARCHAR, '-?[0-9]{1,18}(\.0*)?')
  THEN split_part(value::VARCHAR, '.', 1)::BIGINT END;
CREATE MACRO _count(value) AS CASE WHEN _whole(value) >= 0 THEN _whole(value) END;
CREATE MACRO _name(value) AS coalesce(_string(value),
  CASE WHEN regexp_full_match(value::VARCHAR, '-?[0-9]+') THEN value::VARCHAR END);
CREATE MACRO _truth(value) AS CASE value::VARCHAR WHEN 'true' THEN true WHEN 'false' THEN false END;
CREATE MACRO _json(value) AS CASE WHEN value::VARCHAR <> 'null' THEN value END;
CREATE MACRO _list(value) AS CASE WHEN left(value::VARCHAR, 1) = '[' THEN value::JSON[] END;
CREATE MACRO _utc(value) AS try_cast(value AS TIMESTAMPTZ) AT TIME ZONE 'UTC';
"""
_SMALLEST_OBJECT = 1 << 16
_ITERATION = rf"nullif(regexp_extract({FILE}, 'iteration_(\d{{6,}})[^/]*(/[^/]*)?$', 1), '')::BIGINT"
# As DuckDB itself names a bad line, so that our own reader is sent to look for it.
_IS_OBJECT = (
    """(left(json::VARCHAR, 1) = '{' OR error('Not an object in file "' || filename || '", in line 0'))"""
)


class Scan(NamedTuple):
    """How files are read."""

    unfinished: frozenset[Path]  # files whose last line is left out: it is being written
    largest_object: int

    def records(self, files: Sequence[DataFile]) -> str:
        """What to put after FROM."""
        parts = []
        for (is_parquet, is_unfinished), group in groupby(
            files, key=lambda file: (file.is_parquet, file.path in self.unfinished)
        ):
            chosen = list(group)
            if is_parquet:
                parts += [_parquet(file) for file in chosen]
                continue
            paths = ", ".join(literal(duckdb_pattern(file.path)) for file in chosen)
            reading = (
                f"read_ndjson_objects([{paths}], filename = true, ignore_errors = {is_unfinished}, "
                f"maximum_object_size = {self._object_size(chosen)})"
            )
            condition = "json IS NOT NULL" if is_unfinished else _IS_OBJECT
            parts.append(
                f"SELECT json AS {ROW}, {FILE}, {_ITERATION} AS _iteration FROM {reading} WHERE {condition}"
            )
        return f"({' UNION ALL '.join(parts)})"

    def _object_size(self, files: Sequence[DataFile]) -> int:
        """Buffers are made to this measure, and a run may have thousands of small files."""
        return min(max(file.path.stat().st_size for file in files) + _SMALLEST_OBJECT, self.largest_object)


class Fields:
    """Values of a record, as JSON, by their paths: it is parsed once for all of them."""

    def __init__(self, parent: str = ROW, name: str = "_fields") -> None:
        self._parent, self._name = parent, name
        self._paths: list[str] = []

    def __call__(self, path: str) -> str:
        """The value at `a.b[0]`, or at a path that begins with `$`."""
        path = path if path.startswith("$") else f"$.{path}"
        if path not in self._paths:
            self._paths.append(path)
        return f"{self._name}[{self._paths.index(path) + 1}]"

    def of(self, source: str) -> str:
        """A FROM clause with these values beside the columns of the source."""
        listed = ", ".join(literal(path) for path in self._paths)
        return (
            f"(SELECT *, json_extract({self._parent}, [{listed}]::VARCHAR[]) AS {self._name} FROM {source})"
        )


def ends_in_the_middle(path: Path) -> bool:
    """Whether the last line is unfinished: a write under way, or what a killed writer left."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size == 0:
            return False
        file.seek(size - 1)
        return file.read(1) != b"\n"


def _parquet(file: DataFile) -> str:
    """One file at a time: another one's columns are no fields of its rows."""
    name = literal(str(file.path))
    return (
        f"SELECT to_json(_row) AS {ROW}, {name} AS {FILE}, NULL::BIGINT AS _iteration "
        f"FROM {parquet_source(file.path)}"
    )
