"""How DuckDB is told to read lines of JSON, so that it sees what our own readers see.

Whole files go through its typed reader, which parses only the columns a query needs and skips files that a
filter on the file's name rules out. A file whose last line is unfinished is read line by line without it, and
so is every file when a query wants whole records. Each source has the columns asked for and `filename`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import orjson

from rollbook.query.scan import object_size, path_list, records
from rollbook.query.sql import literal, quoted
from rollbook.runs.resolve import DataFile

FILE = "filename"  # only under this name does a filter on it skip files unread
ROW = "row"


def ends_in_the_middle(path: Path) -> bool:
    """Whether the last line is unfinished: a write under way, or what a killed writer left."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size == 0:
            return False
        file.seek(size - 1)
        return file.read(1) != b"\n"


class Reader:
    """Makes the FROM clauses of one query."""

    def __init__(self, unfinished: frozenset[Path], largest_object: int) -> None:
        self.unfinished = unfinished
        self._largest_object = largest_object

    def records(self, files: Sequence[DataFile]) -> str:
        """Whole records, as `row`."""
        return records(files, self.unfinished, self._largest_object)

    def source(
        self, files: Sequence[DataFile], columns: Mapping[str, str], *, with_row: bool = False
    ) -> str | None:
        """What to put after FROM for these columns, and with `row` the record itself; None without files."""
        lines = [file for file in files if not file.is_parquet]
        by_line = [file for file in lines if with_row or file.path in self.unfinished]
        whole = [file for file in lines if not with_row and file.path not in self.unfinished]
        parts = []
        if whole:
            typed = self._typed(whole, columns)
            if len(whole) == len(files):
                return typed  # bare: a projection around it would keep filters from skipping files
            parts.append(f"SELECT * FROM {typed}")
        for is_finished in (True, False):
            if chosen := [file for file in by_line if (file.path not in self.unfinished) is is_finished]:
                raw = self._raw(chosen, is_finished)
                parts.append(self._transformed(raw, columns, with_row))
        if parquet := [file for file in files if file.is_parquet]:
            parts.append(self._transformed(_parquet(parquet), columns, with_row))
        return f"({' UNION ALL BY NAME '.join(parts)})" if parts else None

    def _typed(self, files: Sequence[DataFile], columns: Mapping[str, str]) -> str:
        listed = ", ".join(f"{quoted(name)}: {literal(kind)}" for name, kind in columns.items())
        return self._read(files, f"records=true, columns={{{listed}}}")

    def _raw(self, files: Sequence[DataFile], are_finished: bool) -> str:
        if are_finished:
            # The typed reader refuses what is no object; this is said as it says it.
            reading = self._read(files, f"records=false, columns={{{ROW}: 'JSON'}}")
            refused = f"""error('Not an object in file "' || {FILE} || '", in line 0')"""
            checked = f"CASE WHEN left({ROW}::VARCHAR, 1) = '{{' THEN {ROW} ELSE {refused} END"
            return f"SELECT {checked} AS {ROW}, {FILE} FROM {reading}"
        # What else is wrong in unfinished files was looked for before: see `session.look_for_unfinished`.
        reading = self._read(files, f"records=false, ignore_errors=true, columns={{{ROW}: 'JSON'}}")
        return f"SELECT {ROW}, {FILE} FROM {reading} WHERE {ROW} IS NOT NULL"

    def _read(self, files: Sequence[DataFile], options: str) -> str:
        return (
            f"read_json({path_list(files)}, format='newline_delimited', filename=true, "
            f"maximum_object_size={object_size(files, self._largest_object)}, {options})"
        )

    def _transformed(self, raw: str, columns: Mapping[str, str], with_row: bool) -> str:
        # Text is taken as text, the rest as JSON and then cast: a word where a number must stand is an error.
        shape = {name: "VARCHAR" if kind == "VARCHAR" else "JSON" for name, kind in columns.items()}
        structure = literal(orjson.dumps(shape).decode())
        fields = [f"(_record.{quoted(name)})::{kind} AS {quoted(name)}" for name, kind in columns.items()]
        selected = ", ".join([*fields, *([ROW] if with_row else []), FILE])
        records = f"SELECT json_transform({ROW}, {structure}) AS _record, * FROM ({raw})"
        return f"SELECT {selected} FROM ({records})"


def _parquet(files: Sequence[DataFile]) -> str:
    reading = f"read_parquet({path_list(files)}, union_by_name=true, filename=true)"
    return f"SELECT to_json(t) AS {ROW}, t.{FILE} AS {FILE} FROM {reading} t"
