"""What DuckDB's errors mean for whoever typed the query, and what to type instead."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable

import duckdb

from rollbook.errors import RollbookError, UsageError
from rollbook.query.schema import VIEWS

_SCHEMA = "`rollbook query --schema PATH...` lists the views and their columns"
_NO_TABLE = re.compile(r"Table with name (\S+) does not exist")
_NO_COLUMN = re.compile(r'(?:Referenced column|column named?|Column) "?([^"]+?)"? (?:not found|does not)')


def explain_error(
    error: duckdb.Error, memory: str, known_columns: Callable[[], dict[str, list[str]]]
) -> RollbookError:
    text = str(error).strip()
    if isinstance(error, duckdb.PermissionException):
        return UsageError(
            f"a query reads the views over the named files and nothing else ({text.splitlines()[0]}); "
            "write results with -o FILE"
        )
    if isinstance(error, duckdb.OutOfMemoryException):
        return RollbookError(
            f"the query needs more than --memory {memory}; give it more, e.g. --memory 4GB, select fewer "
            f"columns or rows, or look at free space for spilling ({text.splitlines()[0]})"
        )
    if "pytz" in text:
        return UsageError("a column has a time zone; write it as ...::TIMESTAMP")
    if found := _NO_TABLE.search(text):
        hint = _near(found[1], VIEWS)
        return UsageError(f"no view {found[1]!r}; {hint}there are: {', '.join(VIEWS)}; {_SCHEMA}")
    if isinstance(error, duckdb.BinderException) and (found := _NO_COLUMN.search(text)):
        return UsageError(f"{text}\n{_columns_like(found[1], known_columns())}{_SCHEMA}")
    if isinstance(error, duckdb.ProgrammingError | duckdb.DataError):
        return UsageError(f"{text}\n{_SCHEMA}")
    return RollbookError(text)


def _near(name: str, names: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name.lower(), names, n=1)
    return f"did you mean {near[0]}? " if near else ""


def _columns_like(name: str, known: dict[str, list[str]]) -> str:
    """The nearest columns of all views, quoted where SQL wants it."""
    by_lower = {column.lower(): column for columns in known.values() for column in columns}
    wanted = name.lower()
    near = difflib.get_close_matches(wanted, by_lower, n=4, cutoff=0.6)
    near += [lower for lower in by_lower if wanted in lower.split("/") and lower not in near][:4]
    if not near:
        return ""
    listed = []
    for lower in near:
        column = by_lower[lower]
        views = ", ".join(view for view, columns in known.items() if column in columns)
        shown = column if column.isidentifier() else f'"{column}"'
        listed.append(f"{shown} ({views})")
    return f"near it: {'; '.join(listed)}\n"
