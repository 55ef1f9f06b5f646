"""A uniform sample of rows, or of whole tasks, in the order of the input.

Which rows are taken depends on the seed and on where they stand, nothing else; which tasks, on the seed and
their names, so a task's repeats come all or not at all. Rows are copied byte by byte.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np

from rollbook.data.external_sort import ExternalSort
from rollbook.data.job import DataJob, DataManifest
from rollbook.data.row_index import RowIndex
from rollbook.data.scratch import scratch_beside
from rollbook.data.shuffle import BLOCK, Words, chosen_blocks, numbers_of, stream
from rollbook.errors import UsageError
from rollbook.records.row_keys import task_of
from rollbook.records.rows import Progress


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
    advance: Progress = lambda _: None,
) -> DataManifest:
    """Write `count` rows, or a `fraction` of them; with `by_task`, of tasks with all their rows."""
    _check_size(count, fraction)
    arguments = {"count": count, "fraction": fraction, "by_task": by_task, "shuffle": shuffle}
    job = DataJob(
        "sample", inputs, output, arguments=arguments, seed=seed, overwrite=overwrite, advance=advance
    )
    with job, scratch_beside(output) as directory:
        if by_task:
            chosen = _rows_of_tasks(job, directory, count, fraction, seed)
        else:
            chosen = _rows(job, directory, advance, count, fraction, seed)
        if shuffle:
            chosen = _shuffled(chosen, directory, stream(seed, "order"))
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


def _rows(
    job: DataJob, directory: Path, advance: Progress, count: int | None, fraction: float | None, seed: int
) -> Iterator[bytes]:
    index = RowIndex(job.paths, directory, advance)
    for file in index.files:
        job.set_rows(file.path, file.rows, file.blank)
    wanted = _how_many(count, fraction, index.rows, "rows")
    return (row.data for row in index.read(chosen_blocks(stream(seed, "sample"), index.rows, wanted)))


def _rows_of_tasks(
    job: DataJob, directory: Path, count: int | None, fraction: float | None, seed: int
) -> Iterator[bytes]:
    """One pass names the tasks by hashes (eight bytes a task held, eight a row on the disk), one copies."""
    names = directory / "tasks"
    tasks = np.empty(0, dtype=np.uint64)
    with names.open("xb") as file:
        for block in _task_blocks(job):
            block.tofile(file)
            tasks = np.union1d(tasks, block)
    wanted = _how_many(count, fraction, len(tasks), "tasks")
    numbers = numbers_of(stream(seed, "sample"), tasks)
    chosen = np.sort(tasks[np.argsort(numbers)[:wanted]])
    job.count("tasks_in", len(tasks))
    job.count("tasks_out", wanted)
    return _copied(job, names, chosen)


def _copied(job: DataJob, names: Path, chosen: Words) -> Iterator[bytes]:
    rows = job.rows()
    with names.open("rb") as file:
        while len(block := np.fromfile(file, dtype=np.uint64, count=BLOCK)):
            for is_chosen in np.isin(block, chosen).tolist():
                row = next(rows)
                if is_chosen:
                    yield row.data


def _task_blocks(job: DataJob) -> Iterator[Words]:
    held: list[int] = []
    for row in job.rows():
        name = task_of(row.value()).encode(errors="surrogatepass")
        held.append(int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little"))
        if len(held) == BLOCK:
            yield np.array(held, dtype=np.uint64)
            held = []
    yield np.array(held, dtype=np.uint64)


def _shuffled(rows: Iterator[bytes], directory: Path, order: int) -> Iterator[bytes]:
    sort = ExternalSort(directory)
    for number, data in enumerate(rows):
        [place] = numbers_of(order, np.array([number], dtype=np.uint64)).tolist()
        sort.add(place, number, data)
    return (data for _, _, data in sort.ordered())
