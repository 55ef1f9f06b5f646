"""What a collected row says about itself, as SQL over its JSON: who it is, what it earned, what it cost.

One place for all commands: `rollbook query`, the conditions of `data filter`, and whatever chooses rows. A
row is parsed once for all columns. One that does not say whose it is gets its name from `task_of`, by a
function that is called for such rows only.
"""

from __future__ import annotations

import duckdb

from rollbook.query.scan import Fields
from rollbook.records.numbers import sql_number
from rollbook.records.record import decode_json
from rollbook.records.row_keys import KEY, ROLLOUT_INDEX, TASK_INDEX, task_of

TASK_OF = "_rollbook_task_of"
MACROS = f"""
CREATE MACRO _number(value) AS nullif({sql_number("value::VARCHAR")}, 'nan'::DOUBLE);
"""


def keys(field: Fields) -> dict[str, str]:
    """The keys of a collected row."""
    key = f"_string({field(KEY)})"
    task = (
        f"coalesce(regexp_replace({key}, '#[0-9]{{1,18}}$', ''), _name({field('task_id')}), "
        f"'index-' || _name({field(TASK_INDEX)}), _name({field('id')}), {TASK_OF}(row::VARCHAR))"
    )
    repeat = (
        f"CASE WHEN {key} IS NULL THEN _count({field(ROLLOUT_INDEX)}) "
        f"ELSE nullif(regexp_extract({key}, '#([0-9]{{1,18}})$', 1), '')::BIGINT END"
    )
    return {
        "split": "NULL::VARCHAR",
        "group_idx": f"_whole({field(TASK_INDEX)})",
        "traj_idx": repeat,
        "task_id": task,
    }


def columns(field: Fields) -> dict[str, str]:
    """The columns of `rollouts`."""
    ids = keys(field)
    stop = f"_string({field('stop_reason')})"
    cut_off = (
        f"_number({field('truncated')}) = 1",
        f"_string({field('response.status')}) = 'incomplete'",
        f"{stop} IN ('length', 'max_turns')",
    )
    return {
        **ids,
        "key": f"coalesce(_string({field(KEY)}), {ids['task_id']} || '#' || {ids['traj_idx']})",
        "status": "'ok'",
        "reward": f"_number({field('reward')})",
        "turns": f"_count({field('num_turns')})",
        "input_tokens": f"_count({field('response.usage.input_tokens')})",
        "output_tokens": f"_count({field('response.usage.output_tokens')})",
        "stop_reason": stop,
        "truncated": " OR ".join(f"coalesce({condition}, false)" for condition in cut_off),
        "model": f"_string({field('response.model')})",
    }


def add_function(connection: duckdb.DuckDBPyConnection) -> None:
    connection.create_function(TASK_OF, _task_of_text, ["VARCHAR"], "VARCHAR")


def _task_of_text(text: str) -> str | None:
    row = decode_json(text.encode())
    return task_of(row) if isinstance(row, dict) else None
