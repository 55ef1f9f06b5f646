"""Which fields of collected rows are their task's, and which the rollout's own.

A collector puts an environment's metrics beside what the task brought along. No name tells them apart, but
what differs between two rollouts of one task is not the task's. Without repeats there is nothing to compare.
Repeats may stand anywhere, so every row is looked at; what is kept of them, hashes, DuckDB puts on the disk.
"""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import orjson
import xxhash

from rollbook.data.columns import insert
from rollbook.records.row_keys import KEY, ROLLOUT_INDEX, STEPS, TASK_INDEX

_HELD = 200_000  # values that are handed over at once
_ROLLOUTS = frozenset(
    {KEY, ROLLOUT_INDEX, STEPS, "reward", "response", "stop_reason", "num_turns", "logs", "source"}
)
_TASKS = frozenset({TASK_INDEX, "task_id", "id", "responses_create_params"})
_KNOWN = _ROLLOUTS | _TASKS
_THE_ROW = 0  # stands for no field: there is one in every row
_DIFFERING = f"""
    with tasks as (
        select task, field, count(*) as times, min(value) <> max(value) as differs
        from fields group by task, field
    )
    select distinct field from tasks join (select task, times as rows from tasks where field = {_THE_ROW})
    using (task) where differs or times <> rows
"""


class TaskFields:
    """Shown every row's task and value, it knows at the end which fields belong to rollouts."""

    def __init__(self, directory: Path) -> None:
        """What does not fit into memory goes to the directory."""
        self._numbers: dict[str, int] = {"": _THE_ROW}
        self._held = array("Q")
        self._connection = duckdb.connect()
        self._connection.execute("set enable_progress_bar = false")
        self._connection.execute("set memory_limit = '256MB'")
        self._connection.execute("set temp_directory = ?", [str(directory)])
        self._connection.execute("create table fields (task ubigint, field ubigint, value ubigint)")

    def note(self, task: str, row: dict[str, Any]) -> None:
        """Keep a hash of every value beside that of its task."""
        who = xxhash.xxh3_64_intdigest(task.encode(errors="surrogatepass"))
        self._held.extend((who, _THE_ROW, 0))
        for name, value in row.items():
            if name not in _KNOWN:
                self._held.extend((who, self._numbers.setdefault(name, len(self._numbers)), _hash(value)))
        if len(self._held) >= 3 * _HELD:
            self._hand_over()

    def differing(self) -> frozenset[str]:
        """What differs between rollouts of one task, or is not in all of them, besides what always may."""
        self._hand_over()
        names = list(self._numbers)
        return frozenset(names[number] for (number,) in self._connection.execute(_DIFFERING).fetchall())

    def of_rollouts(self) -> frozenset[str]:
        """What to leave out of a collected row to have its task."""
        return _ROLLOUTS | self.differing()

    def __enter__(self) -> TaskFields:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def _hand_over(self) -> None:
        columns = np.asarray(self._held, dtype=np.uint64).reshape(-1, 3)
        names = ("task", "field", "value")
        insert(self._connection, "fields", {name: columns[:, place] for place, name in enumerate(names)})
        self._held = array("Q")


def _hash(value: Any) -> int:
    """The same for 4 and 4.0, as two collectors may write it."""
    if isinstance(value, bool) or (isinstance(value, float) and value.is_integer()):
        value = int(value)
    data = b"%d" % value if isinstance(value, int) else orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    return xxhash.xxh3_64_intdigest(data)
