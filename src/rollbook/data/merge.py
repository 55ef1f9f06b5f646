"""Any number of files into one, which then is known to be whole: what `cat` does not tell.

Checked are: every line a JSON object of its own, glued or torn ones named by file and line; every key there
once; and, where a manifest beside the files or a list of tasks says what to expect, that all of it is there.
A file that does not end in a newline gets one. Memory does not grow with the rows.

Plain files of our own rows are copied by blocks while DuckDB checks them on all cores. Everything else, and
whatever that check does not like, goes row by row. (DuckDB tolerates one thing which that reader does not: a
comma before a closing bracket.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path

import numpy as np

from rollbook.data.coverage import Planned, TaskList, planned_by
from rollbook.data.external_sort import ExternalSort
from rollbook.data.job import DataJob, DataManifest
from rollbook.data.quick_check import can_be_quick, rows_if_all_well
from rollbook.data.repeated_keys import Pairs, RepeatedKeys
from rollbook.data.rows import Advance, Row
from rollbook.data.scratch import scratch_beside
from rollbook.errors import BadLineError, UsageError
from rollbook.records.row_keys import ROLLOUT_INDEX, TASK_INDEX, repeat_of, row_key

_BLOCK = 1 << 18  # small enough for the processor's cache
_PUSH_EVERY = 64 << 20
_NEWLINE = ord("\n")
_SHOWN_DUPLICATES = 5
_LAST = (1 << 64) - 1
_ROW_BITS = 40


class Duplicates(StrEnum):
    """What to do with a key that stands in several rows."""

    ERROR = "error"
    FIRST = "first"


class _NotQuick(Exception):
    """The quick check has doubts; whoever reads row by row will say which."""


def merge(
    inputs: Sequence[str | Path],
    output: Path,
    *,
    ordered: bool = False,
    duplicates: Duplicates = Duplicates.ERROR,
    tasks: Path | None = None,
    repeats: int = 1,
    overwrite: bool = False,
    advance: Advance = lambda _: None,
) -> DataManifest:
    """Write all rows to one file; `ordered` by task and repeat, in the order of `tasks` if that is given."""
    if repeats < 1:
        raise UsageError(f"--repeats {repeats}: at least 1")
    arguments = {
        "ordered": ordered,
        "duplicates": duplicates,
        "tasks": str(tasks) if tasks else None,
        "repeats": repeats if tasks else None,
    }

    def new_job(advance: Advance) -> DataJob:
        return DataJob("merge", inputs, output, arguments=arguments, overwrite=overwrite, advance=advance)

    planned = planned_by(new_job(advance).paths)
    if not ordered and tasks is None and output.suffix == ".jsonl":
        try:
            return _merge_blocks(new_job(advance), output, planned, advance)
        except _NotQuick:
            pass
    task_list = TaskList(tasks, repeats) if tasks is not None else None
    return _RowMerge(new_job(advance), planned, task_list, ordered, duplicates).write_to(output)


def _merge_blocks(job: DataJob, output: Path, planned: Planned, advance: Advance) -> DataManifest:
    if not can_be_quick(job.paths):
        raise _NotQuick
    with job, scratch_beside(output) as directory:
        with ThreadPoolExecutor(2, thread_name_prefix="merge") as pool:
            checked = pool.submit(rows_if_all_well, job.paths, directory)
            _BlockCopy(job, checked, pool, advance).run()
            if checked.result() != job.rows_in:  # also with blank lines, which are not rows
                raise _NotQuick
        _report_coverage(job, planned.coverage(job.rows_in), planned)
    return job.manifest


class _BlockCopy:
    """All inputs as they are, with the newline a file may lack; the disk begins while the rest is copied."""

    def __init__(
        self, job: DataJob, checked: Future[int | None], pool: ThreadPoolExecutor, advance: Advance
    ) -> None:
        assert job.output is not None
        self._job, self._checked, self._pool, self._advance = job, checked, pool, advance
        self._output = job.output
        self._pushed: Future[None] | None = None
        self._since_push = 0

    def run(self) -> None:
        for path in self._job.paths:
            self._job.set_rows(path, self._copy(path))
        if self._pushed is not None:
            self._pushed.result()

    def _copy(self, path: Path) -> int:
        """Returns the number of lines."""
        lines, last = 0, b"\n"
        with path.open("rb", buffering=0) as file:
            while block := file.read(_BLOCK):
                newlines = int(np.count_nonzero(np.frombuffer(block, dtype=np.uint8) == _NEWLINE))
                self._write(block, newlines)
                lines, last = lines + newlines, block[-1:]
                self._advance(len(block))
        if last != b"\n":
            self._write(b"\n", 1)
            self._job.count("newlines_added")
            lines += 1
        return lines

    def _write(self, block: bytes, lines: int) -> None:
        if self._checked.done() and self._checked.result() is None:
            raise _NotQuick
        self._output.write_block(block, lines)
        self._since_push += len(block)
        if self._since_push >= _PUSH_EVERY and (self._pushed is None or self._pushed.done()):
            if self._pushed is not None:
                self._pushed.result()
            self._pushed = self._pool.submit(self._output.push_to_disk)
            self._since_push = 0


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
                coverage = self._planned.coverage(ok, self._planned_twice(repeated))
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
        names = {plan: number for number, plan in enumerate(self._planned.plans)}
        plan_of_file = np.array([names[plan] for plan in self._planned.plans])
        plans = plan_of_file[np.searchsorted(ends, repeated, side="right")]
        others = np.column_stack([repeated[:, 1], plans[:, 0]])[plans[:, 0] != plans[:, 1]]
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
        return rows[shown[0][0]].refuse(why)


def _own_place(row: Row) -> tuple[int, int]:
    value = row.value()
    index = value.get(TASK_INDEX)
    if not isinstance(index, int) or index < 0:
        raise row.refuse(f"no {TASK_INDEX} to order by; name the list of tasks with --tasks FILE")
    repeat = repeat_of(value)
    if repeat is None:
        raise row.refuse(f"no {ROLLOUT_INDEX} to order by; name the list of tasks with --tasks FILE")
    return index, repeat


def _report_coverage(job: DataJob, coverage: dict[str, int], planned: Planned | None) -> None:
    job.manifest.coverage = coverage
    if planned is not None and planned.without and len(planned.without) < len(job.paths):
        job.manifest.details["without_manifest"] = [str(path) for path in planned.without]
