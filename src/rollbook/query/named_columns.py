"""Which columns a query can be about.

DuckDB's reader of JSON prepares every column of every file, needed or not. Over the thousands of small files
of a long run that is most of the time, so views over many files have only the columns that a query names. A
query that may mean any column (`*`, a table as a value, NATURAL JOIN) gets them all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

_ALL_OF_THEM = frozenset({"SHOW_REF", "PIVOT"})


def named_columns(tree: Any) -> frozenset[str] | None:
    """The names in a serialized query that can be columns, in lower case; None where any may be meant."""
    names: set[str] = set()
    tables: set[str] = set()
    single: set[str] = set()
    for node in _nodes(tree):
        if (
            node.get("class") == "STAR"
            or node.get("ref_type") == "NATURAL"
            or node.get("type") in _ALL_OF_THEM
        ):
            return None
        if node.get("class") == "COLUMN_REF":
            parts = [part.lower() for part in node["column_names"]]
            names.update(parts)
            single.update(parts[:1] if len(parts) == 1 else ())
        names.update(name.lower() for name in node.get("using_columns") or ())
        if node.get("type") == "BASE_TABLE":
            tables.update(str(node.get(key) or "").lower() for key in ("alias", "table_name"))
    return None if single & tables else frozenset(names)


def mentioned(columns: Mapping[str, str], expressions: Iterable[str]) -> dict[str, str]:
    """Of the columns of a file those that occur in the expressions; one at least, as every reader needs."""
    words = {word for text in expressions for word in re.findall(r"\w+", text)}
    kept = {name: kind for name, kind in columns.items() if name in words}
    return kept or dict(list(columns.items())[:1])


def _nodes(value: Any) -> Iterable[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from _nodes(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _nodes(inner)
