"""Task rows for RL, each with the pass rate that its rollouts showed.

With the file the tasks came from, its rows are used as they are. Without it, a task's row is what its first
rollout carried along, less the metrics it names in `_rb_metrics`; rows of other collectors do not say which
fields are metrics, and keep them. A band of pass rates makes it a curriculum: neither hopeless nor solved.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from rollbook.data.coverage import IS_TASK, add_tasks
from rollbook.data.job import DataJob
from rollbook.data.mixed_graders import note_different_graders
from rollbook.data.profile import PROFILES, Band, TaskProfile
from rollbook.data.progress import NO_PROGRESS, Progress
from rollbook.data.rollout_table import rollout_table, rows_at, task_fields
from rollbook.errors import UsageError
from rollbook.query.connection import Kept
from rollbook.records.datasets import DataManifest
from rollbook.records.rows import read_rows


def rl(
    inputs: Sequence[str | Path],
    output: Path,
    *,
    tasks: Path | None = None,
    pass_reward: float = 1.0,
    band: Band | None = None,
    overwrite: bool = False,
    progress: Progress = NO_PROGRESS,
) -> DataManifest:
    arguments: dict[str, Any] = {"tasks": str(tasks) if tasks else None, "pass_reward": pass_reward}
    arguments["band"] = list(band) if band else None
    with (
        DataJob("rl", inputs, output, arguments=arguments, overwrite=overwrite, progress=progress) as job,
        rollout_table(job) as table,
    ):
        if tasks is None:
            profiles = table.ask(f"{PROFILES} order by first", [pass_reward])
            first = table.numbers("select min(n) from kept group by task_id")
            for line, (_, row) in zip(profiles, rows_at(job, first), strict=True):
                _write(job, task_fields(row), TaskProfile(*line), band)
        else:
            add_tasks(table, tasks)
            _refuse_other_tasks(table, tasks)
            _join(job, table, tasks, pass_reward, band)
        note_different_graders(job)
    return job.manifest


def _refuse_other_tasks(table: Kept, tasks: Path) -> None:
    unknown = f"from (select distinct task_id, _digest from kept) anti join tasks on {IS_TASK}"
    if count := table.one(f"select count(*) {unknown}")[0]:
        some = ", ".join(name for (name,) in table.ask(f"select task_id {unknown} order by 1 limit 3"))
        raise UsageError(
            f"{count} tasks of the rollouts are not in {tasks} (among them {some}); "
            "or are there with other prompts; give the file they were collected from, or leave out --tasks"
        )
    twice = f"select list(distinct task_id order by task_id) as names from kept join tasks on {IS_TASK}"
    for (names,) in table.ask(f"{twice} group by place having len(names) > 1 order by place limit 1"):
        raise UsageError(
            f"{' and '.join(names)} of the rollouts are the same task of {tasks}; "
            "give rollouts of one collector at a time"
        )


def _join(job: DataJob, table: Kept, tasks: Path, pass_reward: float, band: Band | None) -> None:
    """The rows of the task file in their order, each with its profile."""
    digests = "select task_id, max(_digest) as _digest from kept group by task_id"
    joined = f"({PROFILES}) p join ({digests}) using (task_id) join tasks on {IS_TASK}"
    placed = f"select place, p.* from {joined} order by place"
    profiles = table.ask(placed, [pass_reward])
    place, *profile = next(profiles, (None,))
    for number, row in enumerate(read_rows(tasks)):
        if number == place:
            _write(job, row.fields(), TaskProfile(*profile), band)
            place, *profile = next(profiles, (None,))
        else:
            job.count("tasks_without_rollouts")


def _write(job: DataJob, row: dict[str, Any], task: TaskProfile, band: Band | None) -> None:
    if not task.is_in(band):
        job.count("tasks_without_reward" if task.pass_rate is None else "tasks_outside_band")
        return
    numbers = {
        "pass_rate": task.pass_rate,
        "num_rollouts": task.rollouts,
        "mean_reward": task.reward_mean,
        "std_reward": task.reward_std,
    }
    row.setdefault("task_id", task.task_id)
    job.write(orjson.dumps(row | numbers))
