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

KEY = "_rb_key"
TASK_INDEX = "_ng_task_index"
ROLLOUT_INDEX = "_ng_rollout_index"
STEPS = "_rb_steps"  # of a rollout of several turns: what each was and earned
_DIGITS = 18  # of a repeat: what every reader takes for a whole number
PROMPTS = ("responses_create_params", "messages", "prompt", "question", "instruction", "input")


def key_of(task_id: str, repeat: int) -> str:
    return f"{task_id}#{repeat}"


def parted(key: str) -> tuple[str, int | None]:
    """The task's id and the repeat of a key."""
    name, mark, repeat = key.rpartition("#")
    is_repeat = mark and repeat.isdecimal() and repeat.isascii() and len(repeat) <= _DIGITS
    return (name, int(repeat)) if is_repeat else (key, None)


def input_id(row: Mapping[str, Any]) -> str:
    """The name of a row of tasks: its own, or a hash of its content, whatever the order of its keys."""
    for name in ("task_id", "id"):
        if row.get(name) is not None:
            return str(row[name])
    return content_id(row)


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


def content_id(task: Mapping[str, Any]) -> str:
    """The name a collection gives to a task without one: a hash of all it says, in any order of keys."""
    return _hash_of({key: value for key, value in task.items() if not key.startswith("_ng_")})


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
