"""Task rows for RL, each with the pass rate that its rollouts showed.

With the file the tasks came from, its rows are used as they are; without it, a task's row is what its first
rollout carried along, less what differs between rollouts of one task. A band of pass rates makes it a
curriculum: neither hopeless nor solved.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from rollbook.data.coverage import TaskList
from rollbook.data.job import DataJob, DataManifest
from rollbook.data.profile import Band, TaskProfile, task_profiles
from rollbook.data.scratch import scratch_beside
from rollbook.data.table import RolloutTable, pick
from rollbook.data.task_fields import TaskFields
from rollbook.errors import UsageError
from rollbook.records.row_keys import KEY, key_of
from rollbook.records.rows import Advance, read_rows

PASSES_OVER_INPUT = 2


def rl(
    inputs: Sequence[str | Path],
    output: Path,
    *,
    tasks: Path | None = None,
    pass_reward: float = 1.0,
    band: Band | None = None,
    overwrite: bool = False,
    advance: Advance = lambda _: None,
) -> DataManifest:
    arguments: dict[str, Any] = {"tasks": str(tasks) if tasks else None, "pass_reward": pass_reward}
    arguments["band"] = list(band) if band else None
    with (
        DataJob("rl", inputs, output, arguments=arguments, overwrite=overwrite, advance=advance) as job,
        scratch_beside(output) as directory,
        TaskFields(directory) as fields,
        RolloutTable(job.rows(), directory, fields.note if tasks is None else None) as table,
    ):
        if tasks is None:
            first = table.row_numbers("select min(row) from rollouts group by task")
            found = zip(task_profiles(table, pass_reward), pick(job.rows(), first), strict=False)
            not_the_tasks = fields.of_rollouts()
            for task, (_, row) in found:
                own = {key: value for key, value in row.value().items() if key not in not_the_tasks}
                _write(job, own, task, band)
        else:
            _join(job, table, tasks, pass_reward, band)
    return job.manifest


def _join(job: DataJob, table: RolloutTable, tasks: Path, pass_reward: float, band: Band | None) -> None:
    """The rows of the task file in their order; the profiles of a file's tasks fit in memory."""
    listed = TaskList(tasks, repeats=1)
    profiles: dict[int, TaskProfile] = {}
    unknown: list[str] = []
    for task in task_profiles(table, pass_reward):
        place = listed.place_of({KEY: key_of(task.task_id, 0)})
        if place is None:
            unknown.append(task.task_id)
        elif (other := profiles.setdefault(place[0], task)) is not task:
            raise UsageError(
                f"{other.task_id} and {task.task_id} of the rollouts are the same task of {tasks}; "
                "give rollouts of one collector at a time"
            )
    if unknown:
        raise UsageError(
            f"{len(unknown)} tasks of the rollouts are not in {tasks} (among them {', '.join(unknown[:3])}); "
            "give the file they were collected from, or leave out --tasks"
        )
    for number, row in enumerate(read_rows(tasks)):
        if number in profiles:
            _write(job, row.value(), profiles[number], band)
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
