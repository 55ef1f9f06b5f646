"""Queries that only read: one SELECT over the views, whatever it is wrapped in."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection
from typing import Any

import duckdb
import orjson

from rollbook.errors import UsageError

_READING_NODES = frozenset({"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"})
# Others read files, and `json_execute_serialized_sql` runs whatever it is given, a COPY too.
_TABLE_FUNCTIONS = frozenset(
    {
        "unnest",
        "range",
        "generate_series",
        "repeat",
        "json_each",
        "json_tree",
        "query_table",
        "pragma_table_info",
    }
    | {
        f"duckdb_{what}"
        for what in ("columns", "functions", "keywords", "memory", "settings", "tables", "views")
    }
)
_EXPLAIN = re.compile(r"\s*explain\s+(analyze\s+)?(\([^)]*\)\s*)?", re.IGNORECASE)


def check_expression(text: str) -> None:
    """Raise for what is not one expression, as after WHERE."""
    _, tree = parsed(f"SELECT (\n{text}\n)")
    node = tree["statements"][0]["node"]
    parts = ("where_clause", "group_expressions", "having", "qualify", "modifiers")
    is_one = len(node.get("select_list", ())) == 1 and node["from_table"]["type"] == "EMPTY"
    if not is_one or any(node.get(part) for part in parts):
        raise UsageError(f"{text!r} is not a condition; write it as after WHERE in SQL")


def parsed(sql: str) -> tuple[str, Any]:
    """The one statement of a query, which must only read, and what it is made of."""
    with _parser().cursor() as connection:
        try:
            statements = connection.extract_statements(sql)
        except duckdb.Error as error:
            raise UsageError(f"{str(error).strip()}\nrollbook query --schema lists the views") from error
        if len(statements) != 1:
            raise UsageError(f"one query at a time, not {len(statements)}")
        statement = statements[0]
        inner = statement.query
        if statement.type == duckdb.StatementType.EXPLAIN:
            inner = _EXPLAIN.sub("", inner, count=1)
        row = connection.execute("SELECT json_serialize_sql(?::VARCHAR)", [inner]).fetchone()
    tree = orjson.loads(row[0]) if row else {"error": True}
    if tree["error"] or not tree["statements"] or not _only_reads(tree):
        raise UsageError(
            "a query can only read: begin with SELECT, FROM, WITH, DESCRIBE, SUMMARIZE, SHOW or EXPLAIN "
            "(PIVOT needs the values: ON x IN (...)); write results with -o FILE"
        )
    return statement.query, tree


@functools.cache
def _parser() -> duckdb.DuckDBPyConnection:
    """A database for parsing alone, without threads: making one takes longer than most queries."""
    return duckdb.connect(config={"threads": 1})


def may_name(node: Any, columns: Collection[str]) -> bool:
    """Whether a query, as `parsed` gives it, can be about one of these columns."""
    if isinstance(node, list):
        return any(may_name(inner, columns) for inner in node)
    if not isinstance(node, dict):
        return False
    if node.get("class") == "STAR" or node.get("ref_type") == "NATURAL":
        return True
    names = (node.get("column_names") or [])[-1:] + (node.get("using_columns") or [])
    if any(name.lower() in columns for name in names):
        return True
    return any(may_name(inner, columns) for inner in node.values())


def _only_reads(node: Any) -> bool:
    if isinstance(node, dict):
        kind = node.get("type")
        if isinstance(kind, str) and kind.endswith("_NODE") and kind not in _READING_NODES:
            return False
        if kind == "TABLE_FUNCTION" and "function" in node:
            name = str(node["function"].get("function_name")).lower()
            if name not in _TABLE_FUNCTIONS:
                raise UsageError(f"{name}() is not for queries, which read the views and nothing else")
        return all(_only_reads(value) for value in node.values())
    return all(_only_reads(value) for value in node) if isinstance(node, list) else True
