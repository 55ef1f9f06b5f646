"""Any number of files into one, which then is known to be whole: what `cat` does not tell.

Checked are: every line a JSON object of its own, glued or torn ones named by file and line; every key there
once; and, where a manifest beside the files or a list of tasks says what to expect, that all of it is there.
A file that does not end in a newline gets one. DuckDB finds which rows repeat a key and where each belongs;
our reader copies their bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

import numpy as np

from rollbook.data.coverage import IS_TASK, PLANS, Plan, Planned, add_tasks, planned_by
from rollbook.data.external_sort import ExternalSort
from rollbook.data.job import DataJob
from rollbook.data.mixed_graders import note_different_graders
from rollbook.data.progress import NO_PROGRESS, Progress
from rollbook.data.rollout_table import rollout_table, rows_at
from rollbook.errors import BadLineError, UsageError
from rollbook.query.connection import Kept
from rollbook.records.datasets import DataManifest
from rollbook.records.identity import ROLLOUT_INDEX, TASK_INDEX, row_key

_SHOWN_DUPLICATES = 5
_LAST = (1 << 64) - 1
_ROW_BITS = 40
_COLUMNS = "key, strlen(row::VARCHAR) AS bytes"
_FOR_ORDER = "task_id, group_idx AS task_index, traj_idx AS repeat"
_REPEATED = """
    create table repeated as select n, first from (
        select n, min(n) over (partition by key) as first from kept where key is not null
    ) where n <> first
"""
# Of the repeated rows, those of which two plans spoke: what both promise is expected once.
_PLANNED_TWICE = """
    with of_files as (select file, list(plan order by plan) as plans from plans group by file)
    select count(distinct (first, one.plans)) from repeated
    join kept row on row.n = repeated.n join of_files one on one.file = row.file
    join kept earlier on earlier.n = repeated.first join of_files other on other.file = earlier.file
    where not list_has_any(one.plans, other.plans)
"""
_BY_INDEX = "create view placed as select n, task_index as place, repeat from taken"
_BY_TASKS = """
    create view placed as
    select n, case when coalesce(repeat, 0) < {repeats} then place end as place, coalesce(repeat, 0) as repeat
    from taken left join tasks on {is_task}
"""


class Duplicates(StrEnum):
    """What to do with a key that is in several rows."""

    ERROR = "error"
    FIRST = "first"


def merge(
    inputs: Sequence[str | Path],
    output: Path,
    *,
    ordered: bool = False,
    duplicates: Duplicates = Duplicates.ERROR,
    tasks: Path | None = None,
    repeats: int | None = None,
    overwrite: bool = False,
    progress: Progress = NO_PROGRESS,
) -> DataManifest:
    """Write all rows to one file; `ordered` by task and repeat, in the order of `tasks` if that is given."""
    if repeats is not None and repeats < 1:
        raise UsageError(f"--repeats {repeats}: at least 1")
    arguments = {
        "ordered": ordered,
        "duplicates": duplicates,
        "tasks": str(tasks) if tasks else None,
        "repeats": repeats,
    }
    columns = f"{_COLUMNS}, {_FOR_ORDER}" if ordered or tasks is not None else _COLUMNS
    with (
        DataJob("merge", inputs, output, arguments=arguments, overwrite=overwrite, progress=progress) as job,
        rollout_table(job, columns) as table,
    ):
        planned = planned_by(job.paths)
        dropped = _drop_repeated(job, table, duplicates)
        if tasks is None:
            _report_planned(job, table, planned, dropped)
        else:
            _report_tasks(job, table, tasks, repeats or planned.repeats)
        if ordered:
            _write_ordered(job, table, by_index=tasks is None)
        elif dropped:
            for _, row in rows_at(job, table.numbers("select n from taken")):
                job.write(row.data)
        else:
            _copy(job, table)
        note_different_graders(job)
    return job.manifest


def _drop_repeated(job: DataJob, table: Kept, duplicates: Duplicates) -> int:
    """The view `taken` is what is left; returns how many rows repeat the key of an earlier one."""
    without_key, repeated = table.one(
        "select count(*) - count(key), count(key) - count(distinct key) from kept"
    )
    if without_key:
        job.count("rows_without_key", without_key)
    if not repeated:
        table.run("create view taken as from kept")
        return 0
    table.run(_REPEATED)
    if duplicates is Duplicates.ERROR:
        raise _duplicate_keys(job, table, repeated)
    job.count("duplicates_dropped", repeated)
    table.run("create view taken as from kept anti join repeated using (n)")
    return int(repeated)


def _duplicate_keys(job: DataJob, table: Kept, repeated: int) -> BadLineError:
    """Names both places of the first few keys that are there twice."""
    shown = list(table.ask("select n, first from repeated order by n limit ?", [_SHOWN_DUPLICATES]))
    rows = dict(rows_at(job, np.unique(np.array(shown))))
    texts = []
    for later, first in shown:
        earlier = f"{rows[first].path}:{rows[first].number}"
        texts.append(f"duplicate key {row_key(rows[later].value())!r}, first seen at {earlier}")
    others = [
        f"\n  {rows[later].path}:{rows[later].number}: {text}"
        for (later, _), text in zip(shown[1:], texts[1:], strict=True)
    ]
    more = f"\n  ... and {repeated - len(shown)} more" if repeated > len(shown) else ""
    why = texts[0] + "".join(others) + more + "\nkeep the first of each with --duplicates first"
    return rows[shown[0][0]].error(why)


def _report_planned(job: DataJob, table: Kept, planned: Planned, dropped: int) -> None:
    """What the manifests of the files promise; nothing unless each of them has one."""
    twice = 0
    if dropped and not planned.without:
        pairs = [(str(path.absolute()), name) for path, plans in planned.plans.items() for name in plans]
        files, names = np.array(pairs, dtype=object).T
        table.add("plans", file=files.copy(), plan=names.copy())
        twice = table.one(_PLANNED_TWICE)[0]
    coverage = planned.coverage_of_keys(job.rows_in - dropped, twice)
    job.manifest.coverage = coverage
    if coverage:
        plans = planned.distinct
        if sum(plan.rollouts for plan in plans.values()) != coverage["expected"]:  # they overlap
            tasks = sum(plan.tasks for plan in plans.values())
            plans = {str(job.manifest.output): Plan(tasks, coverage["expected"])}
        job.manifest.details[PLANS] = plans
    elif len(planned.without) < len(job.paths):
        job.manifest.details["without_manifest"] = [str(path) for path in planned.without]


def _report_tasks(job: DataJob, table: Kept, tasks: Path, repeats: int) -> None:
    expected = add_tasks(table, tasks) * repeats
    table.run(_BY_TASKS.format(repeats=repeats, is_task=IS_TASK))
    count = "count(*) - count(place), count(distinct (place, repeat)) filter (place is not null)"
    others, ok = table.one(f"select {count} from placed")
    if others:
        job.count("not_in_tasks", others)
    job.manifest.coverage = {"expected": expected, "ok": ok, "missing": expected - ok}


def _write_ordered(job: DataJob, table: Kept, *, by_index: bool) -> None:
    """Write the rows by task and repeat; rows of no task come last, in their present order."""
    if by_index:
        _refuse_without_index(job, table)
        table.run(_BY_INDEX)
    sharing = "select count(place) - count(distinct (place, repeat)) filter (place is not null) from placed"
    if count := table.one(sharing)[0]:
        job.count("sharing_an_index", count)
    rows = ExternalSort(job.scratch)
    places = table.ask("select place, repeat from placed order by n")
    for (number, row), (place, repeat) in zip(
        rows_at(job, table.numbers("select n from taken")), places, strict=True
    ):
        first, second = (_LAST, 0) if place is None else (place, repeat)
        rows.add(first, (second << _ROW_BITS) + number, row.data)
    for _, _, data in rows.ordered():
        job.write(data)


def _refuse_without_index(job: DataJob, table: Kept) -> None:
    question = "select n, coalesce(task_index, -1) < 0 from taken where task_index is null or task_index < 0"
    for number, no_index in table.ask(f"{question} or repeat is null order by n limit 1"):
        [(_, row)] = rows_at(job, np.array([number]))
        name = TASK_INDEX if no_index else ROLLOUT_INDEX
        raise row.error(f"no {name} to order by; name the list of tasks with --tasks FILE")


def _copy(job: DataJob, table: Kept) -> None:
    """All rows as they are: whole files at once, where nothing but rows and newlines is in them."""
    job.progress.begin("copying", sum(job.ends.values()))
    sizes = {
        file: (rows, size)
        for file, rows, size in table.ask("select file, count(*), sum(bytes + 1) from kept group by file")
    }
    for path in job.paths:
        rows, size = sizes.get(str(path.absolute()), (0, 0))
        is_plain = path.suffix in (".jsonl", ".ndjson")
        if is_plain and size - job.ends[path] in (0, 1):
            job.copy(path, rows)
        else:
            for row in job.rows_of(path):
                job.write(row.data)
