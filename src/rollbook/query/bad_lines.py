"""What is wrong in a file that DuckDB stopped at, found by our own readers, which know the line."""

from __future__ import annotations

from collections.abc import Iterable

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
    """Raise for the first complete line that is no JSON object."""
    for line in read_lines(file.path, end=file.end, accept_tail=True):
        if line.data.strip() and not (file.end is None and _is_under_way(line)):
            decode_line(file.path, line)


def _is_under_way(line: Line) -> bool:
    """Whether it lacks its newline and is no JSON yet; an object is none before its last character."""
    if line.end - line.start > len(line.data):
        return False
    try:
        decode_json(line.data)
    except ValueError:
        return True
    return False
