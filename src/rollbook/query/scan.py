"""Files as the records of a FROM clause: `row`, the exact text of a line as JSON, and its `filename`.

DuckDB hands on each line byte for byte: long numbers, the order of keys and escapes stay as they are. Files
are read in the order in which they are given, which `preserve_insertion_order` keeps up to the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from rollbook.query.sql import literal
from rollbook.records.rows import duckdb_pattern, parquet_source
from rollbook.runs.resolve import DataFile

_SMALLEST_OBJECT = 1 << 16
# As DuckDB itself names a bad line, so that our own reader is sent to look for it.
_IS_OBJECT = (
    """(left(json::VARCHAR, 1) = '{' OR error('Not an object in file "' || filename || '", in line 0'))"""
)


def path_list(files: Sequence[DataFile]) -> str:
    return "[" + ", ".join(literal(duckdb_pattern(file.path)) for file in files) + "]"


def object_size(files: Sequence[DataFile], largest: int) -> int:
    """Buffers are made to this measure, and a run may have thousands of small files."""
    return min(max(file.path.stat().st_size for file in files) + _SMALLEST_OBJECT, largest)


def records(files: Sequence[DataFile], unfinished: frozenset[Path], largest: int) -> str:
    """What to put after FROM. The unfinished last line of the `unfinished` files is left out."""
    parts = []
    for (is_parquet, is_unfinished), group in groupby(
        files, key=lambda file: (file.is_parquet, file.path in unfinished)
    ):
        chosen = list(group)
        if is_parquet:
            parts += [_parquet(file) for file in chosen]
            continue
        size = object_size(chosen, largest)
        reading = (
            f"read_ndjson_objects({path_list(chosen)}, filename = true, maximum_object_size = {size}, "
            f"ignore_errors = {str(is_unfinished).lower()})"
        )
        condition = "json IS NOT NULL" if is_unfinished else _IS_OBJECT
        parts.append(f"SELECT json AS row, filename FROM {reading} WHERE {condition}")
    return f"({' UNION ALL '.join(parts)})"


def _parquet(file: DataFile) -> str:
    """One file at a time: another one's columns are no fields of its rows."""
    return (
        f"SELECT to_json(_row) AS row, {literal(str(file.path))} AS filename FROM {parquet_source(file.path)}"
    )
