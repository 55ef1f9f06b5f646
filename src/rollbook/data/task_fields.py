"""Which fields of collected rows are their task's, and which the rollout's own.

A collector puts an environment's metrics beside what the task brought along. No name tells them apart, but
what differs between two rollouts of one task is not the task's. Without repeats there is nothing to compare.
Repeats may stand anywhere, so every row is looked at; what is kept of them, hashes, DuckDB puts on the disk.
"""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import orjson
import pyarrow as pa
import xxhash

from rollbook.data.rows import Row, read_rows
from rollbook.records.row_keys import KEY, ROLLOUT_INDEX, TASK_INDEX, task_of

_HELD = 200_000  # values that are handed over at once
_ROLLOUTS = frozenset(
    {KEY, ROLLOUT_INDEX, "reward", "response", "stop_reason", "num_turns", "logs", "source"}
)
_TASKS = frozenset({TASK_INDEX, "task_id", "id", "responses_create_params"})
_THE_ROW = 0  # stands for no field: there is one in every row
_DIFFERING = f"""
    with tasks as (
        select task, field, count(*) as times, min(value) <> max(value) as differs
        from fields group by task, field
    )
    select distinct field from tasks join (select task, times as rows from tasks where field = {_THE_ROW})
    using (task) where differs or times <> rows
"""


def rollout_fields(paths: Sequence[Path]) -> frozenset[str]:
    """What to leave out of a collected row to have its task."""
    return _ROLLOUTS | differing_fields(paths)


def differing_fields(paths: Sequence[Path]) -> frozenset[str]:
    """What differs between rollouts of one task, or is not in all of them, besides what always may."""
    with tempfile.TemporaryDirectory(prefix="rollbook-fields-") as directory, duckdb.connect() as connection:
        connection.execute("set enable_progress_bar = false")
        connection.execute("set memory_limit = '256MB'")
        connection.execute(f"set temp_directory = '{directory}'")
        connection.execute("create table fields (task ubigint, field ubigint, value ubigint)")
        names = _note(chain.from_iterable(map(read_rows, paths)), connection)
        found = connection.execute(_DIFFERING).fetchall()
    return frozenset(names[number] for (number,) in found)


def _note(rows: Iterable[Row], connection: duckdb.DuckDBPyConnection) -> list[str]:
    """Put a hash of every value beside that of its task; the names of the fields by their numbers."""
    numbers: dict[str, int] = {"": _THE_ROW}
    held = array("Q")
    known = _ROLLOUTS | _TASKS
    for row in rows:
        value = row.value()
        task = xxhash.xxh3_64_intdigest(task_of(value).encode(errors="surrogatepass"))
        held.extend((task, _THE_ROW, 0))
        for name, inner in value.items():
            if name not in known:
                held.extend((task, numbers.setdefault(name, len(numbers)), _hash(inner)))
        if len(held) >= 3 * _HELD:
            _hand_over(held, connection)
            held = array("Q")
    _hand_over(held, connection)
    return list(numbers)


def _hand_over(held: array[int], connection: duckdb.DuckDBPyConnection) -> None:
    columns = np.asarray(held, dtype=np.uint64).reshape(-1, 3)
    batch = pa.table({name: columns[:, place] for place, name in enumerate(("task", "field", "value"))})
    connection.from_arrow(batch).insert_into("fields")


def _hash(value: Any) -> int:
    """The same for 4 and 4.0, as two collectors may write it."""
    if isinstance(value, bool) or (isinstance(value, float) and value.is_integer()):
        value = int(value)
    data = b"%d" % value if isinstance(value, int) else orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    return xxhash.xxh3_64_intdigest(data)
