"""The views, each as one SELECT over the files that hold its records.

A branch says where a column comes from in one kind of file; columns it does not name are NULL, and every
branch is cast to the types of the schema. Without any file a view is empty and has the same columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rollbook.query import rows
from rollbook.query.metric_keys import metric_columns
from rollbook.query.named_columns import mentioned
from rollbook.query.reading import FILE, ROW, Reader
from rollbook.query.schema import COLUMNS
from rollbook.query.sql import literal, quoted
from rollbook.query.task_names import NAME, NAME_OR_MARK, OF_RECORD
from rollbook.records.field_paths import FieldPath
from rollbook.records.row_keys import STEPS
from rollbook.records.turns import CUT_SHORT
from rollbook.runs.resolve import DataFile, Role, Sources

OWNERS = "_rollbook.owners"  # the table of files: _path, _run, _split

MACROS = """
CREATE SCHEMA _rollbook;
CREATE MACRO _text(value) AS CASE json_type(value)
  WHEN 'VARCHAR' THEN value->>'$'
  WHEN 'ARRAY' THEN array_to_string(
    list_transform(try_cast(value AS JSON[]), lambda part: CASE json_type(part) WHEN 'VARCHAR' THEN part->>'$'
      ELSE coalesce(nullif(part->>'$.text', ''), part->>'$.refusal', '') END), '') END;
CREATE MACRO _items(value) AS CASE json_type(value)
  WHEN 'VARCHAR' THEN [json_object('role', 'user', 'content', value)]
  WHEN 'ARRAY' THEN try_cast(value AS JSON[]) ELSE []::JSON[] END;
CREATE MACRO _system(value) AS CASE WHEN json_type(value) = 'VARCHAR' AND value->>'$' <> ''
  THEN [json_object('role', 'system', 'content', value)] ELSE []::JSON[] END;
CREATE MACRO _utc(value) AS try_cast(value AS TIMESTAMPTZ) AT TIME ZONE 'UTC';
"""

# The name of an iteration's file says its number, and a filter on it then skips all other files.
_ITERATION = rf"nullif(regexp_extract({FILE}, 'iteration_(\d{{6,}})[^/]*(/[^/]*)?$', 1), '')"
_IDS = {
    "split": "VARCHAR",
    "group_idx": "BIGINT",
    "traj_idx": "BIGINT",
    "task_id": "VARCHAR",
}
_IN_ITERATION = {
    "split": "coalesce(split, _split)",
    "iteration": _ITERATION,
    "group_idx": "group_idx",
    "traj_idx": "traj_idx",
    "task_id": "task_id",
}
_ROW_KEYS = {
    "_rb_key": "VARCHAR",
    "task_id": "JSON",
    "_ng_task_index": "BIGINT",
    "_ng_rollout_index": "BIGINT",
    "id": "JSON",
}
_IN_COLLECTION = {
    "split": "_split",
    "group_idx": "_ng_task_index",
    "traj_idx": r"coalesce(try_cast(regexp_extract(_rb_key, '#(\d+)$', 1) AS BIGINT), _ng_rollout_index)",
    "task_id": NAME_OR_MARK,
}


_Collected = tuple[str | None, Mapping[str, str]]


class Wanted(NamedTuple):
    sources: Sources
    reader: Reader
    with_row: bool
    names: frozenset[str] | None = None  # the only columns a query can be about; None for any
    unnamed: frozenset[Path] = frozenset()  # collected rows that do not say which task is theirs
    in_order: bool = False  # of the rows in their files, which a join does not keep
    values: Sequence[FieldPath] = ()  # further columns of collected rows, as JSON: v0, v1, ...
    numbered: bool = False  # and the number of each, _n

    def reads(self, columns: Mapping[str, str], values: Mapping[str, str], *also: str) -> Mapping[str, str]:
        """Of the columns of a file those that the wanted columns of the view come from."""
        if self.names is None:
            return columns
        return mentioned(columns, [*(values[name] for name in values if name in self.names), *also])

    def collected(self, columns: Mapping[str, str], *, with_row: bool = False) -> list[_Collected]:
        """The rows of collections, and where the keys of the view come from in them."""
        files = self.sources.of(Role.ROWS)
        named = [file for file in files if file.path not in self.unnamed]
        others = [file for file in files if file.path in self.unnamed]
        return [
            (self.reader.source(named, {**_ROW_KEYS, **columns}, with_row=with_row), _IN_COLLECTION),
            (
                self.reader.source(others, {**_ROW_KEYS, **columns}, with_row=True),
                _IN_COLLECTION | {"task_id": OF_RECORD},
            ),
        ]


def view_sql(name: str, wanted: Wanted) -> str:
    """The SELECT of a view."""
    if name == "metrics":
        return _metrics(wanted)
    branches = [branch for branch in _BRANCHES[name](wanted) if branch is not None]
    return " UNION ALL ".join(branches) if branches else _empty(name, wanted.with_row)


def _empty(name: str, with_row: bool) -> str:
    nothing = ", ".join(f"NULL::{kind} AS {quoted(column)}" for column, kind in _types(name, with_row))
    return f"SELECT {nothing} WHERE false"


def _types(name: str, with_row: bool) -> list[tuple[str, str]]:
    hidden = name == "rollouts" and not with_row
    return [(column.name, column.type) for column in COLUMNS[name] if not (hidden and column.name == ROW)]


def _branch(
    name: str,
    source: str | None,
    values: Mapping[str, str],
    *,
    names: frozenset[str] | None,
    with_row: bool = False,
    where: str = "true",
    owners: str = f" JOIN {OWNERS} ON {FILE} = _path",
    more: str = "",
) -> str | None:
    if source is None:
        return None
    values = {"run": "_run", **values, "file": FILE, **({ROW: ROW} if with_row else {})}
    selected = ", ".join(
        f"({values.get(column, 'NULL')})::{kind} AS {quoted(column)}"
        for column, kind in _types(name, with_row)
        if names is None or column in names or column == "run"
    )
    return f"SELECT {selected}{more} FROM {source}{owners} WHERE {where}"


def _rollouts(wanted: Wanted) -> list[str | None]:
    reader, with_row, names = wanted.reader, wanted.with_row, wanted.names
    totals = {
        "status": "VARCHAR",
        "total_reward": "DOUBLE",
        "final_reward": "DOUBLE",
        "steps": "JSON[]",
        "stop_reason": "VARCHAR",
        "error": "VARCHAR",
        "tags": "VARCHAR[]",
        "sampling_client_step": "BIGINT",
        "trajectory_metrics": "JSON",
    }
    last_metrics = "json_keys(steps[-1]->'$.metrics')"
    # Tinker's loops say it by a metric `stop/<reason>` of the last step.
    stop = f"coalesce(stop_reason, list_filter({last_metrics}, lambda key: key LIKE 'stop/%')[1][6:])"
    of_summary = {
        "status": "coalesce(status, 'ok')",
        "reward": "total_reward",
        "final_reward": "final_reward",
        "turns": "len(steps)",
        "input_tokens": "list_sum(list_transform(steps, lambda step: (step->>'$.ob_len')::BIGINT))",
        "output_tokens": "list_sum(list_transform(steps, lambda step: (step->>'$.ac_len')::BIGINT))",
        "stop_reason": stop,
        "truncated": f"coalesce({stop} IN {CUT_SHORT}, false)",
        "error": "error",
        "tags": "tags",
        "sampling_client_step": "sampling_client_step",
        "metrics": "trajectory_metrics",
    }
    columns = wanted.reads(_IDS | totals, _IN_ITERATION | of_summary)
    summaries = reader.source(wanted.sources.of(Role.SUMMARIES), columns, with_row=with_row)
    recorded = _branch("rollouts", summaries, _IN_ITERATION | of_summary, names=names, with_row=with_row)
    return [recorded, _collected_rollouts(wanted)]


def _collected_rollouts(wanted: Wanted) -> str | None:
    files = wanted.sources.of(Role.ROWS)
    if not files:
        return None
    records = wanted.reader.records(files)
    if wanted.numbered:
        records = f"(SELECT *, row_number() OVER () - 1 AS _n FROM {records})"
    source = rows.with_fields(records, wanted.values)
    values = {**rows.columns(), "split": "_split"}
    if not wanted.in_order:
        return _branch("rollouts", source, values, names=wanted.names, with_row=wanted.with_row)
    names = [literal(file.run) for file in files]
    paths = ", ".join(literal(str(file.path)) for file in files)
    run = f"map([{paths}], [{', '.join(names)}])[{FILE}]" if len(files) > 1 else names[0]
    values |= {"split": "'collect'", "run": run}
    more = "".join(f", {rows.value_of(place)} AS v{place}" for place in range(len(wanted.values)))
    more += ", _n" if wanted.numbered else ""
    return _branch("rollouts", source, values, names=None, with_row=True, owners="", more=more)


def _steps(wanted: Wanted) -> list[str | None]:
    columns = {**wanted.reads(_IDS, _IN_ITERATION), "steps": "JSON[]"}
    recorded = wanted.reader.source(wanted.sources.of(Role.SUMMARIES), columns)
    values = {
        "step_idx": "coalesce((_step->>'$.step_idx')::BIGINT, _n - 1)",
        **{key: f"_step->>'$.{key}'" for key in ("ob_len", "ac_len", "reward", "episode_done")},
        **{key: f"_step->'$.{key}'" for key in ("metrics", "logs")},
    }
    # A row has the steps of several turns; a single turn is the row itself.
    whole = (
        "CASE WHEN num_turns = 1 THEN [json_object('step_idx', 0, 'reward', reward, 'episode_done', true, "
        "'ob_len', response->'$.usage.input_tokens', 'ac_len', response->'$.usage.output_tokens')] END"
    )
    fields = {STEPS: "JSON[]", "num_turns": "BIGINT", "reward": "JSON", "response": "JSON"}
    branches: list[_Collected] = [(recorded, _IN_ITERATION)]
    for found, keys in wanted.collected(fields):
        if found is not None:
            branches.append(_listing(found, keys, STEPS, f"coalesce({STEPS}, {whole}) AS steps"))
    return [
        _branch("steps", _each("steps", "_step", source), {**keys, **values}, names=wanted.names)
        for source, keys in branches
    ]


# An item of its own in Responses: what it holds is thought, in `content` or in `summary`.
_IS_REASONING = "(_message->>'$.type' IS NOT DISTINCT FROM 'reasoning')"


def _transcripts(wanted: Wanted) -> list[str | None]:
    reader, sources = wanted.reader, wanted.sources
    message = {
        "step_idx": "_message->>'$.step_idx'",
        "message_idx": "_n - 1",
        "role": "coalesce(_message->>'$.role', CASE _message->>'$.type' "
        "WHEN 'function_call_output' THEN 'tool' WHEN 'function_call' THEN 'assistant' "
        "WHEN 'reasoning' THEN 'assistant' END)",
        "content": f"CASE WHEN NOT {_IS_REASONING} THEN coalesce(_text(_message->'$.content'), "
        "_text(_message->'$.output'), _message->>'$.refusal') END",
        "reasoning": f"CASE WHEN {_IS_REASONING} THEN coalesce(nullif(_text(_message->'$.content'), ''), "
        "_text(_message->'$.summary')) "
        "ELSE coalesce(_message->>'$.reasoning_content', _text(_message->'$.reasoning')) END",
        # A call is an item of its own in Responses; here it is in chat's form, as in transcripts of runs.
        "tool_calls": "coalesce(_message->'$.tool_calls', CASE _message->>'$.type' WHEN 'function_call' THEN "
        "json_array(json_object('id', _message->'$.call_id', 'type', 'function', 'function', "
        "json_object('name', _message->'$.name', 'arguments', _message->'$.arguments'))) END)",
        "message": "_message",
    }
    columns = {**wanted.reads(_IDS, _IN_ITERATION), "messages": "JSON[]"}
    told = reader.source(sources.of(Role.TRANSCRIPTS), columns)
    asked = {"messages": "JSON[]", "responses_create_params": "JSON", "response": "JSON"}
    asked_first = "_system(responses_create_params->'$.instructions')"
    both = f"{asked_first} || _items(responses_create_params->'$.input') || _items(response->'$.output')"
    branches: list[_Collected] = [(told, _IN_ITERATION)]
    for found, keys in wanted.collected(asked):
        if found is not None:
            branches.append(_listing(found, keys, "messages", f"coalesce(messages, {both}) AS messages"))
    return [
        _branch("transcripts", _each("messages", "_message", source), {**keys, **message}, names=wanted.names)
        for source, keys in branches
    ]


def _listing(rows: str, keys: Mapping[str, str], column: str, made: str) -> _Collected:
    """Rows with a list in the place of a column; the task is named once for all elements of it."""
    whole = f"(SELECT * EXCLUDE ({column}), {keys['task_id']} AS _task, {made} FROM {rows})"
    return whole, {**keys, "task_id": "_task"}


def _each(many: str, one: str, source: str | None) -> str | None:
    """A row for each element of a list, numbered from 1 by `_n`."""
    if source is None:
        return None
    unnested = f"unnest({many}) AS {one}, generate_subscripts({many}, 1) AS _n"
    return f"(SELECT * EXCLUDE ({many}), {unnested} FROM {source})"


def _checkpoints(wanted: Wanted) -> list[str | None]:
    columns = {
        "name": "VARCHAR",
        "batch": "BIGINT",
        "epoch": "DOUBLE",
        "final": "BOOLEAN",
        "state_path": "VARCHAR",
        "sampler_path": "VARCHAR",
        "saved_at": "VARCHAR",
    }
    source = wanted.reader.source(wanted.sources.of(Role.CHECKPOINTS), columns, with_row=True)
    values = {**{name: quoted(name) for name in columns}, "iteration": "batch", "saved_at": "_utc(saved_at)"}
    return [_branch("checkpoints", source, values, names=wanted.names, with_row=True)]


_FAILED = "status = 'error'"


def _failures(wanted: Wanted) -> list[str | None]:
    reader, sources = wanted.reader, wanted.sources
    text = dict.fromkeys(("kind", "message", "failed_at"), "VARCHAR")
    columns = text | {"status": "JSON", "attempts": "JSON"}
    given_up = reader.source(sources.of(Role.FAILURES), {**_ROW_KEYS, **columns})
    of_summary = {"kind": "split_part(error, ':', 1)", "message": "error"}
    all_of_them = _IDS | {"status": "VARCHAR", "error": "VARCHAR"}
    kept = wanted.reads(all_of_them, _IN_ITERATION | of_summary, _FAILED)
    summaries = reader.source(sources.of(Role.SUMMARIES), kept)
    of_row = {
        "kind": "kind",
        "message": "message",
        "http_status": "try_cast(status AS BIGINT)",
        "attempts": "attempts",
        "failed_at": "_utc(failed_at)",
    }
    return [
        _branch("failures", summaries, _IN_ITERATION | of_summary, names=wanted.names, where=_FAILED),
        _branch("failures", given_up, _IN_COLLECTION | of_row | {"task_id": NAME}, names=wanted.names),
    ]


_STEP_KEYS = ("step", "progress/batch", "training_client/step", "current_steps")


def _metrics(wanted: Wanted) -> str:
    files = wanted.sources.of(Role.METRICS, Role.TRAINER_LOG)
    keys = metric_columns(files)
    source = wanted.reader.source(files, keys.types, with_row=keys.with_row) if keys.types else None
    if source is None:
        return _empty("metrics", False)
    steps = [quoted(name) for name in _STEP_KEYS if name in keys.types]
    step = f"coalesce({', '.join([*steps, 'NULL'])})::BIGINT"
    selected = ", ".join(f"{value} AS {quoted(name)}" for name, value in keys.selected.items())
    return (
        f"SELECT _run AS run, {step} AS step, {step} AS iteration, {selected + ', ' if selected else ''}"
        f"{FILE} AS file FROM {source} JOIN {OWNERS} ON {FILE} = _path"
    )


_BRANCHES: dict[str, Callable[[Wanted], list[str | None]]] = {
    "rollouts": _rollouts,
    "steps": _steps,
    "transcripts": _transcripts,
    "checkpoints": _checkpoints,
    "failures": _failures,
}

NUMBERS: dict[Role, tuple[str, ...]] = {
    Role.SUMMARIES: ("group_idx", "traj_idx", "total_reward", "final_reward", "sampling_client_step"),
    Role.TRANSCRIPTS: ("group_idx", "traj_idx"),
    Role.ROWS: ("num_turns", "_ng_task_index", "_ng_rollout_index"),
    Role.FAILURES: ("_ng_task_index", "_ng_rollout_index"),
    Role.CHECKPOINTS: ("batch", "epoch"),
}


def numbers_of(file: DataFile) -> tuple[str, ...]:
    """The keys of a file's records that must hold numbers."""
    return NUMBERS.get(file.role, ())
