"""The views, each as one SELECT over the files that hold its records.

A branch says where a column comes from in one kind of file; columns it does not name are NULL, and every
branch is cast to the types of the schema. Values of another type than the column's are NULL too. Without any
file a view is empty and has the same columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rollbook.query import rows, task_ids
from rollbook.query.metric_keys import metric_columns
from rollbook.query.scan import FILE, ROW, Fields, Scan
from rollbook.query.schema import COLUMNS
from rollbook.query.sql import literal, quoted
from rollbook.records.field_paths import FieldPath, json_path
from rollbook.records.identity import STEPS
from rollbook.records.turns import CUT_SHORT
from rollbook.runs.resolve import Role, Sources

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
CREATE MACRO _measured(steps, whole) AS CASE WHEN steps IS NOT NULL OR whole IS NOT NULL THEN
  list_reduce(list_transform(list_prepend('{}'::JSON, list_append(list_transform(coalesce(steps, []::JSON[]),
    lambda step: step->'$.metrics'), whole)),
    lambda one: CASE WHEN left(one::VARCHAR, 1) = '{' THEN one ELSE '{}' END),
    lambda one, other: json_merge_patch(one, other)) END;
CREATE MACRO _sum(steps, length) AS
  list_sum(list_transform(steps, lambda step: _whole(json_extract(step, length))));
"""
_Values = Mapping[str, str]
_JOINED = f" JOIN {OWNERS} ON {FILE} = _path"


class Wanted(NamedTuple):
    sources: Sources
    scan: Scan
    with_row: bool
    in_order: bool = False  # of the rows in their files, which a join does not keep
    values: Sequence[FieldPath] = ()  # further columns of collected rows, as JSON: v0, v1, ...
    numbered: bool = False  # and the number of each, _n
    with_names: bool = False  # of tasks, as they are told apart: see task_ids

    @property
    def task(self) -> str:
        """What a task is shown as."""
        return "coalesce(_shown_as, _task._id)" if self.with_names else "_task._id"

    def records(self, *roles: Role) -> str | None:
        files = self.sources.of(*roles)
        return self.scan.records(files) if files else None

    def tasks(self, source: str) -> str:
        """A source of `task_ids` with the names of tasks, where they are wanted."""
        return f"{source} AS _task{task_ids.JOINED if self.with_names else ''}"


def view_sql(name: str, wanted: Wanted) -> str:
    """The SELECT of a view."""
    branches = [branch for branch in _BRANCHES[name](wanted) if branch is not None]
    return " UNION ALL ".join(branches) if branches else _empty(name, wanted.with_row)


def name_tasks(wanted: Wanted) -> str:
    """Statements that find out what tasks are to be shown as."""
    sources = []
    if (records := wanted.records(Role.ROWS)) is not None:
        sources.append(task_ids.of_rows(Fields(), records))
    if (records := wanted.records(Role.SUMMARIES)) is not None:
        sources.append(task_ids.of_records(Fields(), records))
    return task_ids.name_tasks(sources) if sources else ""


def _empty(name: str, with_row: bool) -> str:
    nothing = ", ".join(f"NULL::{kind} AS {quoted(column)}" for column, kind in _types(name, with_row))
    return f"SELECT {nothing} WHERE false"


def _types(name: str, with_row: bool) -> list[tuple[str, str]]:
    hidden = name == "rollouts" and not with_row
    return [(column.name, column.type) for column in COLUMNS[name] if not (hidden and column.name == ROW)]


def _branch(
    name: str,
    source: str,
    values: _Values,
    *,
    with_row: bool = True,
    where: str = "true",
    owners: str = _JOINED,
    more: str = "",
) -> str:
    values = {"run": "_run", **values, "file": FILE, ROW: ROW}
    selected = ", ".join(
        f"({values.get(column, 'NULL')})::{kind} AS {quoted(column)}"
        for column, kind in _types(name, with_row)
    )
    return f"SELECT {selected}{more} FROM {source}{owners} WHERE {where}"


def _ids(field: Fields, task: str) -> _Values:
    """The keys of a record of a run."""
    return {
        "split": f"_string({field('split')})",
        "iteration": "_iteration",
        "group_idx": f"_whole({field('group_idx')})",
        "traj_idx": f"_whole({field('traj_idx')})",
        "task_id": task,
        "task_digest": "_task_digest",
    }


def _rollouts(wanted: Wanted) -> list[str | None]:
    return [_recorded_rollouts(wanted), _collected_rollouts(wanted)]


def _recorded_rollouts(wanted: Wanted) -> str | None:
    if (records := wanted.records(Role.SUMMARIES)) is None:
        return None
    field = Fields()
    steps = f"_list({field('steps')})"
    # Tinker's loops say it by a metric `stop/<reason>` of the last step.
    metrics = f"json_keys({steps}[-1]->'$.metrics')"
    said = f"list_filter({metrics}, lambda key: key LIKE 'stop/%')[1][6:]"
    stop = f"coalesce(_string({field('stop_reason')}), {said})"
    values = {
        **_ids(field, wanted.task),
        "status": f"coalesce(_string({field('status')}), 'ok')",
        "reward": f"_number({field('total_reward')})",
        "final_reward": f"_number({field('final_reward')})",
        "turns": f"len({steps})",
        "input_tokens": f"_sum({steps}, '$.ob_len')",
        "output_tokens": f"_sum({steps}, '$.ac_len')",
        "stop_reason": stop,
        "truncated": f"coalesce({stop} IN {CUT_SHORT}, false)",
        "error": f"_string({field('error')})",
        "tags": f"list_transform(_list({field('tags')}), lambda tag: tag->>'$')",
        "sampling_client_step": f"_whole({field('sampling_client_step')})",
        "metrics": f"_measured({steps}, _json({field('trajectory_metrics')}))",
    }
    values["split"] = f"coalesce({values['split']}, _split)"
    source = wanted.tasks(task_ids.of_records(field, records))
    return _branch("rollouts", source, values, with_row=wanted.with_row)


def _collected_rollouts(wanted: Wanted) -> str | None:
    files = wanted.sources.of(Role.ROWS)
    if not files:
        return None
    records = wanted.scan.records(files)
    if wanted.numbered:
        records = f"(SELECT *, row_number() OVER () - 1 AS _n FROM {records})"
    field = Fields()
    values = {**rows.columns(field, wanted.task), "split": "_split"}
    more = "".join(f", {field(json_path(path))} AS v{place}" for place, path in enumerate(wanted.values))
    source = wanted.tasks(task_ids.of_rows(field, records))
    more += ", _n" if wanted.numbered else ""
    if not wanted.in_order:
        return _branch("rollouts", source, values, with_row=wanted.with_row, more=more)
    names = [literal(file.run) for file in files]
    paths = ", ".join(literal(str(file.path)) for file in files)
    run = f"map([{paths}], [{', '.join(names)}])[{FILE}]" if len(files) > 1 else names[0]
    values |= {"split": "'collect'", "run": run}
    more += "".join(f", _task.{column}" for column in task_ids.TASK)
    return _branch("rollouts", source, values, owners="", more=more)


def _steps(wanted: Wanted) -> list[str | None]:
    # A row has the steps of several turns; a single turn is the row itself.
    field = Fields()
    single = (
        f"CASE WHEN _whole({field('num_turns')}) = 1 THEN [json_object('step_idx', 0, 'reward', "
        f"{field('reward')}, 'episode_done', true, 'ob_len', {field('response.usage.input_tokens')}, "
        f"'ac_len', {field('response.usage.output_tokens')})] END"
    )
    item = Fields("_item", "_of_item")
    values = {
        "step_idx": f"coalesce(_whole({item('step_idx')}), _n - 1)",
        **{key: f"_whole({item(key)})" for key in ("ob_len", "ac_len")},
        "reward": f"_number({item('reward')})",
        "episode_done": f"_truth({item('episode_done')})",
        **{key: item(key) for key in ("metrics", "logs")},
    }
    recorded = Fields()
    return [
        _items(wanted, "steps", Role.SUMMARIES, recorded, f"_list({recorded('steps')})", item, values),
        _items(wanted, "steps", Role.ROWS, field, f"coalesce(_list({field(STEPS)}), {single})", item, values),
    ]


def _transcripts(wanted: Wanted) -> list[str | None]:
    item = Fields("_item", "_of_item")
    # An item of its own in Responses: what it holds is thought, in `content` or in `summary`.
    kind, is_reasoning = f"{item('type')}->>'$'", f"({item('type')}->>'$' IS NOT DISTINCT FROM 'reasoning')"
    content = f"_text({item('content')})"
    values = {
        "step_idx": f"_whole({item('step_idx')})",
        "message_idx": "_n - 1",
        "role": f"coalesce({item('role')}->>'$', CASE {kind} WHEN 'function_call_output' THEN 'tool' "
        "WHEN 'function_call' THEN 'assistant' WHEN 'reasoning' THEN 'assistant' END)",
        "content": f"CASE WHEN NOT {is_reasoning} THEN coalesce({content}, _text({item('output')}), "
        f"{item('refusal')}->>'$') END",
        "reasoning": f"CASE WHEN {is_reasoning} THEN coalesce(nullif({content}, ''), "
        f"_text({item('summary')})) "
        f"ELSE coalesce({item('reasoning_content')}->>'$', _text({item('reasoning')})) END",
        # A call is an item of its own in Responses; here it is in chat's form, as in transcripts of runs.
        "tool_calls": f"coalesce({item('tool_calls')}, CASE {kind} WHEN 'function_call' THEN "
        f"json_array(json_object('id', {item('call_id')}, 'type', 'function', 'function', "
        f"json_object('name', {item('name')}, 'arguments', {item('arguments')}))) END)",
        "message": "_item",
    }
    field, recorded = Fields(), Fields()
    params, response = "responses_create_params", "response.output"
    said = (
        f"coalesce(_list({field('messages')}), _system({field(f'{params}.instructions')}) || "
        f"_items({field(f'{params}.input')}) || _items({field(response)}))"
    )
    told = f"_list({recorded('messages')})"
    return [
        _items(wanted, "transcripts", Role.TRANSCRIPTS, recorded, told, item, values),
        _items(wanted, "transcripts", Role.ROWS, field, said, item, values),
    ]


def _items(
    wanted: Wanted, view: str, role: Role, field: Fields, many: str, item: Fields, values: _Values
) -> str | None:
    """A row for each element of a list of the records, `_item`, numbered from 1 by `_n`."""
    if (records := wanted.records(role)) is None:
        return None
    is_row = role is Role.ROWS
    keys = rows.keys(field, wanted.task) if is_row else _ids(field, wanted.task)
    kept = ", ".join(f"{value} AS {quoted(name)}" for name, value in keys.items())
    source = (task_ids.of_rows if is_row else task_ids.of_records)(field, records)
    listed = f"SELECT {kept}, {FILE}, {many} AS _many FROM {wanted.tasks(source)}"
    unnested = "unnest(_many) AS _item, generate_subscripts(_many, 1) AS _n"
    source = item.of(f"(SELECT * EXCLUDE (_many), {unnested} FROM ({listed}))")
    named = {name: name for name in keys} | {"split": "_split" if is_row else "coalesce(split, _split)"}
    return _branch(view, source, {**named, **values})


def _checkpoints(wanted: Wanted) -> list[str | None]:
    if (records := wanted.records(Role.CHECKPOINTS)) is None:
        return []
    field = Fields()
    values = {
        "iteration": f"_whole({field('batch')})",
        **{name: f"_string({field(name)})" for name in ("name", "state_path", "sampler_path")},
        "epoch": f"_number({field('epoch')})",
        "final": f"_truth({field('final')})",
        "saved_at": f"_utc(_string({field('saved_at')}))",
    }
    return [_branch("checkpoints", field.of(records), values)]


def _failures(wanted: Wanted) -> list[str | None]:
    branches: list[str | None] = []
    if (records := wanted.records(Role.SUMMARIES)) is not None:
        field = Fields()
        error, ids = f"_string({field('error')})", _ids(field, wanted.task)
        values = {**ids, "kind": f"split_part({error}, ':', 1)", "message": error}
        values["split"] = f"coalesce({ids['split']}, _split)"
        failed = f"_string({field('status')}) = 'error'"
        source = wanted.tasks(task_ids.of_records(field, records))
        branches.append(_branch("failures", source, values, where=failed))
    if (records := wanted.records(Role.FAILURES)) is not None:
        field = Fields()
        values = {
            **rows.keys(field, wanted.task),
            "split": "_split",
            "kind": f"_string({field('kind')})",
            "message": f"_string({field('message')})",
            "http_status": f"_whole({field('status')})",
            "attempts": field("attempts"),
            "failed_at": f"_utc(_string({field('failed_at')}))",
        }
        source = wanted.tasks(task_ids.of_rows(field, records))
        branches.append(_branch("failures", source, values))
    return branches


_STEP_KEYS = ("step", "progress/batch", "training_client/step", "current_steps")


def _metrics(wanted: Wanted) -> list[str | None]:
    keys = metric_columns(wanted.sources.of(Role.METRICS, Role.TRAINER_LOG))
    records = wanted.records(Role.METRICS, Role.TRAINER_LOG)
    if records is None or not keys.types:
        return []
    steps = [keys.value_of(name) for name in _STEP_KEYS if name in keys.types]
    step = f"coalesce({', '.join([*steps, 'NULL'])})::BIGINT"
    selected = ", ".join(f"{value} AS {quoted(name)}" for name, value in keys.selected.items())
    return [
        f"SELECT _run AS run, {step} AS step, {step} AS iteration, {selected + ', ' if selected else ''}"
        f"{FILE} AS file FROM {keys.of(records)}{_JOINED}"
    ]


_BRANCHES: dict[str, Callable[[Wanted], list[str | None]]] = {
    "metrics": _metrics,
    "rollouts": _rollouts,
    "steps": _steps,
    "transcripts": _transcripts,
    "checkpoints": _checkpoints,
    "failures": _failures,
}
