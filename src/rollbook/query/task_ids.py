"""The ids of tasks in SQL, by the rules of records/identity.

Ids and digests that stand in a record are taken from it; where a row says neither, the functions of
records/identity are called for it. Which ids need a mark behind them shows only when all tasks are known: the
table `_rollbook.names` holds the tasks that are shown under another name than their id.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import duckdb
import xxhash
from duckdb.func import SPECIAL

from rollbook.query.scan import FILE, ROW, Fields
from rollbook.query.sql import literal
from rollbook.records.field_paths import json_path
from rollbook.records.identity import (
    DIGEST,
    KEY,
    OWN_IDS,
    SHOWN,
    TASK_INDEX,
    content_id,
    marked_id,
    numbered_id,
    shown_id,
    task_digest,
)
from rollbook.records.record import decode_exactly

FUNCTIONS = ("_shown_id", "_task_digest", "_content_id", "_marked_id", "_numbered_id")
_REMEMBERED = 1 << 16  # tasks: the rows of one often follow each other
_REPEAT = "#[0-9]{1,18}$"
NAMES = "_rollbook.names"
# What tells tasks apart: the id, the digest, and in one file the index of a row without an id.
TASK = ("_id", "_digest", "_place", "_index")
_LISTED = ", ".join(TASK)
EMPTY = (
    f"CREATE TABLE {NAMES} (_id VARCHAR, _digest VARCHAR, _place VARCHAR, _index BIGINT, _shown_as VARCHAR)"
)
_SAME = " AND ".join(f"_names.{column} = {{0}}.{column}" for column in TASK)
JOINED = f" LEFT JOIN {NAMES} AS _names ON {_SAME.format('_task')}"


def of_rows(field: Fields, records: str) -> str:
    """A FROM clause for collected rows, with TASK and `_key`, `_task_digest`, `_task_index` as well."""
    shown = ", ".join(literal(json_path([name])) for name in SHOWN)
    shown = f"json_extract({ROW}, [{shown}])::VARCHAR[]"  # read for rows that do not say more themselves
    ids = ", ".join(f"_name({field(name)})" for name in OWN_IDS)
    key_id = f"regexp_replace(_key, '{_REPEAT}', '')"
    # An id that has its mark already is named without it, as in files where it needs none.
    marked = f"regexp_matches({key_id}, '~[0-9a-f]{{8}}$') AND right({key_id}, 8) = left(_task_digest, 8)"
    own = f"coalesce(CASE WHEN {marked} THEN left({key_id}, -9) ELSE {key_id} END, {ids})"
    is_indexed = "_own IS NULL AND _task_index IS NOT NULL"
    columns = (
        f"_string({field(KEY)}) AS _key, _whole({field(TASK_INDEX)}) AS _task_index, "
        f"coalesce(_string({field(DIGEST)}), _task_digest({shown})) AS _task_digest"
    )
    # A row that shows nothing and has no id is known by its index, in this file and no other.
    task = (
        f"coalesce(_own, _shown_id({shown}), 'index-' || _task_index, _content_id({ROW}::VARCHAR)) AS _id, "
        f"coalesce(_task_digest, CASE WHEN {is_indexed} THEN md5({FILE}) END, '') AS _digest, "
        f"CASE WHEN {is_indexed} THEN {FILE} ELSE '' END AS _place, "
        f"CASE WHEN {is_indexed} THEN _task_index ELSE -1 END AS _index"
    )
    known = f"(SELECT *, {columns} FROM {field.of(records)})"
    return f"(SELECT *, {task} FROM (SELECT *, {own} AS _own FROM {known}))"


def of_records(field: Fields, records: str) -> str:
    """The same for the records of a run."""
    columns = (
        f"_name({field('task_id')}) AS _id, _string({field('task_digest')}) AS _task_digest, "
        "coalesce(_task_digest, '') AS _digest, '' AS _place, -1::BIGINT AS _index"
    )
    return f"(SELECT *, {columns} FROM {field.of(records)})"


def name_tasks(sources: Sequence[str]) -> str:
    """Statements that fill the empty table of names from these FROM clauses."""
    found = " UNION ".join(f"SELECT {_LISTED} FROM {source} WHERE _id IS NOT NULL" for source in sources)
    return f"""
    CREATE TEMP TABLE _found AS {found};
    INSERT INTO {NAMES} SELECT * FROM (
        SELECT _found.*, _numbered_id(
            CASE WHEN _shared._id IS NULL THEN _found._id ELSE _marked_id(_found._id, _digest) END,
            CASE WHEN _index < 0 THEN 1
                ELSE row_number() OVER (PARTITION BY _found._id, _digest, _place ORDER BY _index) END
        ) AS _shown_as
        FROM _found LEFT JOIN (
            SELECT _id FROM _found WHERE _digest <> '' GROUP BY _id HAVING count(DISTINCT _digest) > 1
        ) AS _shared ON _shared._id = _found._id
    ) WHERE _shown_as <> _id;
    DROP TABLE _found;
    """


def rename(table: str, column: str, value: str) -> str:
    """A statement that gives the tasks of a table, which has the columns TASK, their names."""
    return f"UPDATE {table} SET {column} = {value} FROM {NAMES} AS _names WHERE {_SAME.format(table)}"


def add_functions(connection: duckdb.DuckDBPyConnection) -> None:
    def add(name: str, function: Callable[..., str | None], *types: str) -> None:
        connection.create_function(name, function, list(types), "VARCHAR", null_handling=SPECIAL)

    add("_shown_id", _remembering(shown_id), "VARCHAR[]")
    add("_task_digest", _remembering(task_digest), "VARCHAR[]")
    add("_content_id", _content_id, "VARCHAR")
    add("_marked_id", marked_id, "VARCHAR", "VARCHAR")
    add("_numbered_id", numbered_id, "VARCHAR", "BIGINT")


def _remembering(
    function: Callable[[dict[str, object]], str | None],
) -> Callable[[list[str | None]], str | None]:
    """The function of what rows show, given as JSON texts in the order of SHOWN."""
    known: dict[bytes, str | None] = {}

    def called(texts: list[str | None]) -> str | None:
        key = xxhash.xxh3_128_digest("\0".join(text or "" for text in texts).encode())
        if key not in known:
            if len(known) >= _REMEMBERED:
                known.clear()
            row = {
                name: decode_exactly(text.encode()) for name, text in zip(SHOWN, texts, strict=True) if text
            }
            known[key] = function(row)
        return known[key]

    return called


def _content_id(text: str | None) -> str | None:
    row = decode_exactly(text.encode()) if text is not None else None
    return content_id(row) if isinstance(row, dict) else None
