"""Who is a collected row: the task it belongs to and which repeat of it it is.

A row of ours begins with its key, `{"_rb_key":"<task id>#<repeat>"`. Rows from elsewhere are known by the
names their writers use: `task_id`, `_ng_task_index` with `_ng_rollout_index`, `id`, and without any of them
by a hash of what was asked. So repeats of one task meet in every command, whoever collected them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import orjson

from rollbook.records.identity import KEY as KEY
from rollbook.records.identity import content_id as content_id
from rollbook.records.identity import rollout_key, split_key

TASK_INDEX = "_ng_task_index"
ROLLOUT_INDEX = "_ng_rollout_index"
STEPS = "_rb_steps"  # of a rollout of several turns: what each was and earned
METRICS = "_rb_metrics"  # the names of the fields that the environment measured
_DIGITS = 18  # of a repeat: what every reader takes for a whole number
PROMPTS = ("responses_create_params", "messages", "prompt", "question", "instruction", "input")

key_of, parted = rollout_key, split_key


def task_of(row: Mapping[str, Any]) -> str:
    """The same for all repeats of a task; different for different tasks."""
    key = row.get(KEY)
    if isinstance(key, str):
        return parted(key)[0]
    for name in ("task_id", TASK_INDEX, "id"):
        value = row.get(name)
        if isinstance(value, str | int) and not isinstance(value, bool):
            return str(value) if name != TASK_INDEX else f"index-{value}"
    asked = {name: row[name] for name in PROMPTS if name in row}
    return _hash_of(asked or row)


def repeat_of(row: Mapping[str, Any]) -> int | None:
    key = row.get(KEY)
    if isinstance(key, str):
        return parted(key)[1]
    value = row.get(ROLLOUT_INDEX)
    is_repeat = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**_DIGITS
    return value if is_repeat else None


def row_key(row: Mapping[str, Any]) -> str | None:
    """What no two rows of a dataset may share; None where a row does not say."""
    key = row.get(KEY)
    if isinstance(key, str):
        return key
    repeat = repeat_of(row)
    return None if repeat is None else key_of(task_of(row), repeat)


def _hash_of(value: Mapping[str, Any]) -> str:
    canonical = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    return "row-" + hashlib.blake2b(canonical, digest_size=10).hexdigest()
