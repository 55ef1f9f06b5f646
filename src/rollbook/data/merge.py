"""Any number of files into one, which then is known to be whole: what `cat` does not tell.

Checked are: every line a JSON object of its own, glued or torn ones named by file and line; every key there
once; and, where a manifest beside the files or a list of tasks says what to expect, that all of it is there.
A file that does not end in a newline gets one. Memory does not grow with the rows.

Plain files of our own rows are read once and go by blocks (`block_merge.py`). Everything else, and whatever
the check of blocks does not like, goes row by row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path

import numpy as np

from rollbook.data.block_merge import merge_blocks
from rollbook.data.coverage import PLANS, Plan, Planned, TaskList, planned_by
from rollbook.data.external_sort import ExternalSort
from rollbook.data.job import DataJob, DataManifest
from rollbook.data.quick_check import NotQuick, can_be_quick
from rollbook.data.repeated_keys import Pairs, RepeatedKeys
from rollbook.data.scratch import scratch_beside
from rollbook.errors import BadLineError, UsageError
from rollbook.records.row_keys import ROLLOUT_INDEX, TASK_INDEX, repeat_of, row_key
from rollbook.records.rows import Progress, Row

_SHOWN_DUPLICATES = 5
_LAST = (1 << 64) - 1
_ROW_BITS = 40


class Duplicates(StrEnum):
    """What to do with a key that stands in several rows."""

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
    advance: Progress = lambda _: None,
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

    def new_job(*, takes_digests: bool = True) -> DataJob:
        return DataJob(
            "merge",
            inputs,
            output,
            arguments=arguments,
            overwrite=overwrite,
            takes_digests=takes_digests,
            advance=advance,
        )

    job = new_job(takes_digests=False)
    planned = planned_by(job.paths)
    if not ordered and tasks is None and output.suffix == ".jsonl":
        try:
            return _merge_blocks(job, output, planned, advance)
        except NotQuick:
            pass
    task_list = TaskList(tasks, repeats or planned.repeats) if tasks is not None else None
    return _RowMerge(new_job(), planned, task_list, ordered, duplicates).write_to(output)


def _merge_blocks(job: DataJob, output: Path, planned: Planned, advance: Progress) -> DataManifest:
    if not can_be_quick(job.paths):
        raise NotQuick
    with job, scratch_beside(output) as directory:
        merge_blocks(job, directory, advance)
        _report_coverage(job, planned.coverage_of_keys(job.rows_in), planned)
    return job.manifest


class _RowMerge:
    """Row by row, twice: once to check them all, once to write."""

    def __init__(
        self,
        job: DataJob,
        planned: Planned,
        tasks: TaskList | None,
        ordered: bool,
        duplicates: Duplicates,
    ) -> None:
        self._job, self._planned, self._tasks = job, planned, tasks
        self._ordered, self._duplicates = ordered, duplicates

    def write_to(self, output: Path) -> DataManifest:
        job = self._job
        with job, scratch_beside(output) as directory:
            repeated = self._check(directory)
            if len(repeated) and self._duplicates is Duplicates.ERROR:
                raise self._name(repeated)
            if len(repeated):
                job.count("duplicates_dropped", len(repeated))
            if self._ordered:
                self._write_ordered(repeated, directory)
            else:
                for _, row in self._kept(repeated):
                    if self._tasks is not None:
                        self._place(row)
                    job.write(row.data)
            if self._tasks is not None:
                _report_coverage(job, self._tasks.coverage(), None)
            else:
                ok = job.rows_in - len(repeated)
                coverage = self._planned.coverage_of_keys(ok, self._planned_twice(repeated))
                _report_coverage(job, coverage, self._planned)
        return job.manifest

    def _check(self, directory: Path) -> Pairs:
        keys = RepeatedKeys(directory)
        without = 0
        for row in self._job.rows():
            key = row_key(row.value())
            without += key is None
            keys.add(key)
        if without:
            self._job.count("rows_without_key", without)
        return keys.pairs()

    def _planned_twice(self, repeated: Pairs) -> int:
        """Of the repeated rows, those of which two plans spoke: what both promise is expected once."""
        ends = np.cumsum([self._job.rows_of(path) for path in self._job.paths])
        plans = [frozenset(plans) for plans in self._planned.plans]
        names = list(dict.fromkeys(plans))
        apart = np.array([[not one & other for other in names] for one in names])
        name_of_file = np.array([names.index(plan) for plan in plans])
        found = name_of_file[np.searchsorted(ends, repeated, side="right")]
        others = np.column_stack([repeated[:, 1], found[:, 0]])[apart[found[:, 0], found[:, 1]]]
        return len(np.unique(others, axis=0))

    def _kept(self, repeated: Pairs) -> Iterator[tuple[int, Row]]:
        """The rows with their numbers, without those that repeat an earlier one."""
        dropped = iter(repeated[:, 0].tolist())
        next_dropped = next(dropped, None)
        for number, row in enumerate(self._job.rows()):
            if number == next_dropped:
                next_dropped = next(dropped, None)
            else:
                yield number, row

    def _place(self, row: Row) -> tuple[int, int] | None:
        assert self._tasks is not None
        place = self._tasks.place_of(row.value())
        if place is None:
            self._job.count("not_in_tasks")
        else:
            self._tasks.mark(place)
        return place

    def _write_ordered(self, repeated: Pairs, directory: Path) -> None:
        rows = ExternalSort(directory)
        for number, row in self._kept(repeated):
            place = _own_place(row) if self._tasks is None else self._place(row)
            task, repeat = (_LAST, 0) if place is None else place
            rows.add(task, (repeat << _ROW_BITS) + number, row.data)
        before = None
        for task, second, data in rows.ordered():
            place = task, second >> _ROW_BITS
            if place == before and task != _LAST:
                self._job.count("sharing_an_index")
            before = place
            self._job.write(data)

    def _name(self, repeated: Pairs) -> BadLineError:
        """Both places of the first few keys that stand twice."""
        shown = repeated[:_SHOWN_DUPLICATES].tolist()
        wanted = {number for pair in shown for number in pair}
        rows = {number: row for number, row in enumerate(self._job.rows()) if number in wanted}
        texts = []
        for later, first in shown:
            earlier = f"{rows[first].path}:{rows[first].number}"
            texts.append(f"the key {row_key(rows[later].value())!r} stands at {earlier} already")
        others = [
            f"\n  {rows[later].path}:{rows[later].number}: {text}"
            for (later, _), text in zip(shown[1:], texts[1:], strict=True)
        ]
        more = f"\n  ... and {len(repeated) - len(shown)} more" if len(repeated) > len(shown) else ""
        why = texts[0] + "".join(others) + more + "\nkeep the first of each with --duplicates first"
        return rows[shown[0][0]].error(why)


def _own_place(row: Row) -> tuple[int, int]:
    value = row.value()
    index = value.get(TASK_INDEX)
    if not isinstance(index, int) or index < 0:
        raise row.error(f"no {TASK_INDEX} to order by; name the list of tasks with --tasks FILE")
    repeat = repeat_of(value)
    if repeat is None:
        raise row.error(f"no {ROLLOUT_INDEX} to order by; name the list of tasks with --tasks FILE")
    return index, repeat


def _report_coverage(job: DataJob, coverage: dict[str, int], planned: Planned | None) -> None:
    job.manifest.coverage = coverage
    if planned is not None and not planned.without:
        once = planned.once
        if sum(plan.rollouts for plan in once.values()) != coverage["expected"]:  # they overlap
            once = {
                str(job.manifest.output): Plan(
                    sum(plan.tasks for plan in once.values()), coverage["expected"]
                )
            }
        job.manifest.details[PLANS] = once
    if planned is not None and planned.without and len(planned.without) < len(job.paths):
        job.manifest.details["without_manifest"] = [str(path) for path in planned.without]
