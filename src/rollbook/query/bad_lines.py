"""What is wrong in a file that DuckDB stopped at, found by our own readers, which know the line."""

from __future__ import annotations

from collections.abc import Iterable

from rollbook.errors import BadLineError
from rollbook.query.views import numbers_of
from rollbook.records.jsonl import Line, read_lines
from rollbook.records.record import decode_json, decode_line
from rollbook.records.rows import read_rows
from rollbook.runs.resolve import DataFile


def check_rows(files: Iterable[DataFile]) -> None:
    """Raise for the first file that cannot be read to its end, or holds a line that is no object."""
    for file in files:
        if file.is_plain:
            check_lines(file)
        elif not file.is_parquet:
            for row in read_rows(file.path):
                row.value()


def check_lines(file: DataFile) -> None:
    """Raise for the first complete line that is not what it must be."""
    numbers = numbers_of(file)
    for line in read_lines(file.path, end=file.end, accept_tail=True):
        if not line.data.strip() or (file.end is None and _is_under_way(line)):
            continue
        row = decode_line(file.path, line)
        for key in numbers:
            value = row.get(key)
            if value is not None and not isinstance(value, int | float):
                raise BadLineError(file.path, line.number, f"{key} is {value!r}, where a number must stand")


def _is_under_way(line: Line) -> bool:
    """Whether it lacks its newline and is no JSON yet; an object is none before its last character."""
    if line.end - line.start > len(line.data):
        return False
    try:
        decode_json(line.data)
    except ValueError:
        return True
    return False
