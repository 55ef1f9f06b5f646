"""What a collected row says about itself, as SQL over its JSON: who it is, what it earned, what it cost.

One place for all commands: `rollbook query`, the conditions of `data filter`, and whatever chooses rows. The
columns are over `task_ids.of_rows`, where a row is parsed once for all of them.
"""

from __future__ import annotations

from rollbook.query.scan import ROW, Fields
from rollbook.records.identity import METRICS, ROLLOUT_INDEX
from rollbook.records.numbers import sql_number
from rollbook.records.turns import CUT_SHORT

# The fields of these names as one object; by a pointer, as a name may hold what means something in a path.
_NAMED = r"""
CREATE MACRO _field(value, name) AS
  coalesce(json_extract(value, '/' || replace(replace(name, '~', '~0'), '/', '~1'))::VARCHAR, 'null');
CREATE MACRO _named(value, names) AS CASE WHEN names IS NOT NULL THEN ('{' || coalesce(list_aggregate(
  list_transform(list_filter(names, lambda one: left(one::VARCHAR, 1) = '"'),
    lambda one: one::VARCHAR || ':' || _field(value, one->>'$')), 'string_agg', ','), '') || '}')::JSON END;
"""
MACROS = (
    _NAMED
    + f"""
CREATE MACRO _number(value) AS nullif({sql_number("value::VARCHAR")}, 'nan'::DOUBLE);
"""
)


def keys(field: Fields, task: str) -> dict[str, str]:
    """The keys of a collected row; `task` is what its task is shown as."""
    return {
        "group_idx": "_task_index",
        "traj_idx": f"CASE WHEN _key IS NULL THEN _count({field(ROLLOUT_INDEX)}) "
        "ELSE nullif(regexp_extract(_key, '#([0-9]{1,18})$', 1), '')::BIGINT END",
        "task_id": task,
        "task_digest": "_task_digest",
    }


def columns(field: Fields, task: str) -> dict[str, str]:
    """The columns of `rollouts`."""
    ids = keys(field, task)
    stop = f"_string({field('stop_reason')})"
    cut_off = (
        f"_number({field('truncated')}) = 1",
        f"_string({field('response.status')}) = 'incomplete'",
        f"{stop} IN {CUT_SHORT}",
    )
    return {
        **ids,
        "key": f"{task} || coalesce(regexp_extract(_key, '#[0-9]{{1,18}}$'), '#' || {ids['traj_idx']})",
        "status": "'ok'",
        "reward": f"_number({field('reward')})",
        "turns": f"_count({field('num_turns')})",
        "input_tokens": f"_count({field('response.usage.input_tokens')})",
        "output_tokens": f"_count({field('response.usage.output_tokens')})",
        "stop_reason": stop,
        "truncated": " OR ".join(f"coalesce({condition}, false)" for condition in cut_off),
        "model": f"_string({field('response.model')})",
        "metrics": f"_named({ROW}, _list({field(METRICS)}))",
    }
