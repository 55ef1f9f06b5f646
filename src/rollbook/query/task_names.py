"""The task of a collected row, by the name that the commands over datasets give it.

Rows that say who they are get their name in SQL, which costs nothing. Others are named after what was asked,
by `task_of` itself: such files are read by the record. Which files these are their first rows say; where a
later row differs, SQL gives up with a mark, and the query begins again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rollbook.errors import BadLineError
from rollbook.query.reading import FILE, ROW
from rollbook.query.rows import TASK_OF
from rollbook.records.row_keys import KEY, TASK_INDEX
from rollbook.records.rows import read_rows
from rollbook.runs.resolve import DataFile

FUNCTION = TASK_OF
OF_RECORD = f"{FUNCTION}({ROW}::VARCHAR)"
_MARK = re.compile('a row names no task in "(.*)"')
# A name is a text or a whole number; of a key the repeat is left out.
_NAME = """CASE WHEN left({0}::VARCHAR, 1) = '"' THEN {0}->>'$'
    WHEN regexp_full_match({0}::VARCHAR, '-?[0-9]+') THEN {0}::VARCHAR END"""
NAME = (
    f"coalesce(regexp_replace({KEY}, '#[0-9]{{1,18}}$', ''), {_NAME.format('task_id')}, "
    f"'index-' || {TASK_INDEX}, {_NAME.format('id')})"
)
NAME_OR_MARK = f"""coalesce({NAME}, error('a row names no task in "' || {FILE} || '"'))"""


def is_mark(error: Exception) -> bool:
    """Whether a query ended at a row without a name."""
    return _MARK.search(str(error)) is not None


def begins_without_names(file: DataFile) -> bool:
    try:
        first = next(read_rows(file.path), None)
        return first is not None and not _has_name(first.value())
    except BadLineError:  # under way, or to be found by the query
        return False


def _has_name(row: Mapping[str, Any]) -> bool:
    if isinstance(row.get(KEY), str):
        return True
    names = (row.get(name) for name in ("task_id", TASK_INDEX, "id"))
    return any(isinstance(name, str | int) and not isinstance(name, bool) for name in names)
