"""Every line of plain files of our own rows checked on all cores, and their number and uniqueness with it.

DuckDB parses each line whole and refuses glued, torn and garbled ones, but is not exact about where. So this
says only whether all is well. Where it is not, or where a file is of another kind, the reader that goes row
by row decides, and names the place.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import duckdb

from rollbook.records.row_keys import KEY

_MEMORY = "1GB"
_PATTERN_CHARACTERS = frozenset("*?[]{}")
_OUR_ROW = b'{"' + KEY.encode() + b'":"'
# `records` is said because finding it out by itself costs DuckDB more than all the rest.
_QUESTION = f"""
    select coalesce(sum(times), 0), coalesce(sum(times) filter (key is null), 0),
           count(*) filter (times > 1 and key is not null)
    from (
        select if({KEY} is null, null, hash({KEY})) as key, count(*) as times
        from read_json(?, format = 'newline_delimited', records = true, columns = {{'{KEY}': 'VARCHAR'}})
        group by key
    )
"""


def can_be_quick(paths: Sequence[Path]) -> bool:
    return all(
        path.suffix in (".jsonl", ".ndjson")
        and not _PATTERN_CHARACTERS.intersection(str(path))
        and _begins_like_ours(path)
        for path in paths
    )


def rows_if_all_well(paths: Sequence[Path], directory: Path) -> int | None:
    """The number of rows, if every line is a JSON object and has a key that no other has; else None."""
    with duckdb.connect() as connection:
        connection.execute(f"set memory_limit = '{_MEMORY}'")
        connection.execute("set temp_directory = ?", [str(directory)])
        connection.execute("set preserve_insertion_order = false")
        connection.execute("set enable_progress_bar = false")  # it has its own idea of when to draw one
        try:
            [(rows, keyless, repeated)] = connection.execute(
                _QUESTION, [[str(path) for path in paths]]
            ).fetchall()
        except duckdb.Error:
            return None
    return None if keyless or repeated else int(rows)


def _begins_like_ours(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_OUR_ROW)) in (_OUR_ROW, b"")
