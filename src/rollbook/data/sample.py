"""A uniform sample of rows, or of whole tasks, in the order of the input.

Which rows are taken depends on the seed and on how many there are, nothing else; which tasks, on the seed and
their names, so a task's repeats come all or not at all. Rows are copied byte by byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np

from rollbook.data.external_sort import shuffled
from rollbook.data.job import DataJob
from rollbook.data.places import Ints, RowPlaces, permutation
from rollbook.data.progress import NO_PROGRESS, Progress
from rollbook.data.rollout_table import rollout_table, rows_at
from rollbook.errors import UsageError
from rollbook.records.datasets import DataManifest
from rollbook.records.rows import Row

_TASKS = """
    create table tasks as select task_id, row_number() over (order by task_id) - 1 as place
    from (select distinct task_id from kept)
"""


def sample(
    inputs: Sequence[str | Path],
    output: Path,
    *,
    count: int | None = None,
    fraction: float | None = None,
    by_task: bool = False,
    shuffle: bool = False,
    seed: int = 0,
    overwrite: bool = False,
    progress: Progress = NO_PROGRESS,
) -> DataManifest:
    """Write `count` rows, or a `fraction` of them; with `by_task`, of tasks with all their rows."""
    _check_size(count, fraction)
    arguments = {"count": count, "fraction": fraction, "by_task": by_task, "shuffle": shuffle}
    with DataJob(
        "sample", inputs, output, arguments=arguments, seed=seed, overwrite=overwrite, progress=progress
    ) as job:
        if by_task:
            numbers = _rows_of_tasks(job, count, fraction, seed)
            rows: Iterator[Row] = (row for _, row in rows_at(job, numbers))
        else:
            places = RowPlaces(job, job.paths)
            wanted = _how_many(count, fraction, places.rows, "rows")
            numbers = np.sort(permutation(places.rows, seed, "sample")[:wanted])
            rows = places.read(numbers)
        chosen: Iterator[bytes] = (row.data for row in rows)
        if shuffle:
            chosen = shuffled(job.scratch, chosen, permutation(len(numbers), seed, "order"))
        for data in chosen:
            job.write(data)
    return job.manifest


def _check_size(count: int | None, fraction: float | None) -> None:
    if (count is None) == (fraction is None):
        raise UsageError("say how much to take: -n ROWS or --fraction SHARE, one of the two")
    if count is not None and count < 1:
        raise UsageError(f"-n {count}: at least 1")
    if fraction is not None and not 0 < fraction <= 1:
        raise UsageError(f"--fraction {fraction:g}: more than 0 and at most 1")


def _how_many(count: int | None, fraction: float | None, available: int, what: str) -> int:
    if count is None:
        return round(Fraction(str(fraction)) * available)
    if count > available:
        raise UsageError(f"-n {count}: there are only {available} {what}")
    return count


def _rows_of_tasks(job: DataJob, count: int | None, fraction: float | None, seed: int) -> Ints:
    with rollout_table(job, "task_id") as table:
        table.run(_TASKS)
        (available,) = table.one("select count(*) from tasks")
        wanted = _how_many(count, fraction, available, "tasks")
        job.count("tasks_in", available)
        job.count("tasks_out", wanted)
        table.add("chosen", place=permutation(available, seed, "sample")[:wanted])
        return table.numbers("select n from kept join tasks using (task_id) join chosen using (place)")
