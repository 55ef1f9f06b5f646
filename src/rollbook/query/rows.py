"""What a collected row says about itself, as SQL over its JSON: who it is, what it earned, what it cost.

One place for all commands: `rollbook query`, the conditions of `data filter`, and whatever chooses rows. A
row is parsed once for all columns. One that does not say whose it is gets its name from `task_of`, by a
function that is called for such rows only.
"""

from __future__ import annotations

from collections.abc import Sequence

import duckdb

from rollbook.query.sql import literal
from rollbook.records.field_paths import FieldPath, json_path
from rollbook.records.numbers import sql_number
from rollbook.records.record import decode_json
from rollbook.records.row_keys import KEY, ROLLOUT_INDEX, TASK_INDEX, task_of
from rollbook.records.turns import CUT_SHORT

TASK_OF = "_rollbook_task_of"
MACROS = r"""
CREATE MACRO _string(value) AS CASE WHEN left(value::VARCHAR, 1) = '"' THEN value->>'$' END;
CREATE MACRO _whole(value) AS CASE WHEN regexp_full_match(value::VARCHAR, '-?[0-9]{1,18}(\.0*)?')
  THEN split_part(value::VARCHAR, '.', 1)::BIGINT END;
CREATE MACRO _count(value) AS CASE WHEN _whole(value) >= 0 THEN _whole(value) END;
CREATE MACRO _name(value) AS coalesce(_string(value),
  CASE WHEN regexp_full_match(value::VARCHAR, '-?[0-9]+') THEN value::VARCHAR END);
"""
_PATHS = (
    *(KEY, "task_id", "id", TASK_INDEX, ROLLOUT_INDEX, "reward", "num_turns", "stop_reason", "truncated"),
    *(f"response.{path}" for path in ("model", "status", "usage.input_tokens", "usage.output_tokens")),
)


def with_fields(records: str, values: Sequence[FieldPath] = ()) -> str:
    """A FROM clause with `row`, `filename` and what the columns are made from: `columns`, and `value_of`."""
    paths = ", ".join([f"'$.{path}'" for path in _PATHS] + [literal(json_path(path)) for path in values])
    return f"(SELECT *, json_extract(row, [{paths}]) AS _fields FROM {records})"


def value_of(place: int) -> str:
    """One of the further values of `with_fields`, as JSON."""
    return f"_fields[{len(_PATHS) + 1 + place}]"


def columns() -> dict[str, str]:
    """The columns of `rollouts`, over `with_fields`."""
    key = f"_string({_field(KEY)})"
    task = (
        f"coalesce(regexp_replace({key}, '#[0-9]{{1,18}}$', ''), _name({_field('task_id')}), "
        f"'index-' || _name({_field(TASK_INDEX)}), _name({_field('id')}), {TASK_OF}(row::VARCHAR))"
    )
    repeat = (
        f"CASE WHEN {key} IS NULL THEN _count({_field(ROLLOUT_INDEX)}) "
        f"ELSE nullif(regexp_extract({key}, '#([0-9]{{1,18}})$', 1), '')::BIGINT END"
    )
    stop = f"_string({_field('stop_reason')})"
    cut_off = (
        f"{_number('truncated')} = 1",
        f"_string({_field('response.status')}) = 'incomplete'",
        f"{stop} IN {CUT_SHORT}",
    )
    return {
        "group_idx": f"_whole({_field(TASK_INDEX)})",
        "traj_idx": repeat,
        "task_id": task,
        "key": f"coalesce({key}, {task} || '#' || {repeat})",
        "status": "'ok'",
        "reward": _number("reward"),
        "turns": f"_count({_field('num_turns')})",
        "input_tokens": f"_count({_field('response.usage.input_tokens')})",
        "output_tokens": f"_count({_field('response.usage.output_tokens')})",
        "stop_reason": stop,
        "truncated": " OR ".join(f"coalesce({condition}, false)" for condition in cut_off),
        "model": f"_string({_field('response.model')})",
    }


def add_function(connection: duckdb.DuckDBPyConnection) -> None:
    connection.create_function(TASK_OF, _task_of_text, ["VARCHAR"], "VARCHAR")


def _field(path: str) -> str:
    return f"_fields[{_PATHS.index(path) + 1}]"


def _number(path: str) -> str:
    return f"nullif({sql_number(f'{_field(path)}::VARCHAR')}, 'nan'::DOUBLE)"


def _task_of_text(text: str) -> str | None:
    row = decode_json(text.encode())
    return task_of(row) if isinstance(row, dict) else None
