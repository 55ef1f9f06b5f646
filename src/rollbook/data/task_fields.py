"""Which fields of collected rows are their task's, and which the rollout's own.

A collector puts an environment's metrics beside what the task brought along. No name tells them apart, but
what differs between two rollouts of one task is not the task's. Without repeats there is nothing to compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from rollbook.data.rows import read_rows
from rollbook.records.row_keys import KEY, ROLLOUT_INDEX, TASK_INDEX, task_of

_LOOKED_AT = 20_000  # rows; a metric that differs does so among the first ones
_ROLLOUTS = frozenset(
    {KEY, ROLLOUT_INDEX, "reward", "response", "stop_reason", "num_turns", "logs", "source"}
)
_TASKS = frozenset({TASK_INDEX, "task_id", "id", "responses_create_params"})


def rollout_fields(paths: Sequence[Path]) -> frozenset[str]:
    """What to leave out of a collected row to have its task."""
    first: dict[str, dict[str, Any]] = {}
    found: set[str] = set()
    known = _ROLLOUTS | _TASKS
    for row in islice(chain.from_iterable(map(read_rows, paths)), _LOOKED_AT):
        value = row.value()
        others = {name: inner for name, inner in value.items() if name not in known}
        before = first.setdefault(task_of(value), others)
        if before != others:
            names = before.keys() | others.keys()
            found |= {name for name in names if before.get(name, ...) != others.get(name, ...)}
    return _ROLLOUTS | found
