"""The narrow table of a dataset: a few columns of every row, however many, by which rows are chosen.

Repeats of a task stand anywhere in a file, since results are written as they complete. DuckDB reads the files
and spills what does not fit into memory; questions to the table name the rows that matter by their numbers,
and `rows_at` reads those.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rollbook.data.job import DataJob
from rollbook.errors import RollbookError
from rollbook.query.connection import Kept
from rollbook.query.session import Session
from rollbook.query.sql import literal
from rollbook.records.row_keys import KEY, METRICS, ROLLOUT_INDEX, STEPS
from rollbook.records.rows import Row, read_rows
from rollbook.runs.resolve import rows_of

T = TypeVar("T")
ROLLOUTS = "task_id, group_idx as task_index, reward, input_tokens, output_tokens, truncated"
# Of a row of a collection what belongs to the rollout; the row names its metrics.
_OF_ROLLOUTS = frozenset(
    {KEY, ROLLOUT_INDEX, STEPS, METRICS, "reward", "response", "stop_reason", "num_turns", "logs", "source"}
)
_COUNTS = "select file, min(rowid), count(*) from scanned group by file order by file"
_SORTED = """
    create table sorted as select scanned.* from scanned join (
        select rowid as number, row_number() over (partition by file order by rowid) as place from scanned
    ) on scanned.rowid = number where place <= {rows} order by file, number;
    drop table scanned;
    alter table sorted rename to scanned;
"""


def rollout_table(job: DataJob, columns: str = ROLLOUTS, *, numbered: bool = False) -> Kept:
    """The table `kept`: these columns of the view `rollouts`, the row's number `n`, and its `file`.

    `numbered`: the columns may do what does not keep the order of rows, such as a join.
    """
    paths = {str(path.absolute()): path for path in job.paths}
    watch = job.watch("scanning")
    session = Session(rows_of(job.ends), scratch=job.scratch, watch=watch, numbered=numbered)
    files = f"file::ENUM({', '.join(map(literal, paths))}) AS file"
    order = " ORDER BY _n" if numbered else ""
    table = session.keep(f"SELECT {columns}, {files} FROM rollouts{order}", "scanned")
    # Within a file rows are in order, but DuckDB may begin with a later file before an earlier one, and it
    # reads what was appended since the job began.
    counts: dict[str, int] = {}
    is_sorted = True
    for file, first, rows in table.ask(_COUNTS):
        is_sorted = is_sorted and first == sum(counts.values())
        counts[file] = _rows_of(job, paths[file], rows)
        is_sorted = is_sorted and counts[file] == rows
    if not is_sorted:
        cases = " ".join(f"when {literal(file)} then {rows}" for file, rows in counts.items())
        table.run(_SORTED.format(rows=f"case file {cases} end"))
    table.run("create view kept as select rowid as n, * from scanned")
    for file, path in paths.items():
        job.note_scan(path, counts.get(file, 0))
    watch(1)
    return table


def _rows_of(job: DataJob, path: Path, scanned: int) -> int:
    """How many rows of a file count: those that were there when the job began."""
    end = job.ends[path]
    return scanned if path.stat().st_size == end else sum(1 for _ in read_rows(path, end=end))


def rows_at(job: DataJob, numbers: np.ndarray[Any, Any]) -> Iterator[tuple[int, Row]]:
    """The rows of these numbers in the order of the dataset, in one pass over it."""
    wanted = iter(np.sort(numbers).tolist())
    following = next(wanted, None)
    for number, row in enumerate(job.rows()):
        if number == following:
            yield number, row
            following = next(wanted, None)


def rows_with(job: DataJob, values: Iterable[T]) -> Iterator[tuple[Row, T]]:
    """Every row with its value, which come in the same order."""
    try:
        yield from zip(job.rows(), values, strict=True)
    except ValueError as error:
        raise RollbookError(
            "a file was changed while it was read, and nothing is written; try again"
        ) from error


def task_fields(row: Row) -> dict[str, Any]:
    """The fields that a rollout has from its task, as they are written."""
    fields = row.fields()
    metrics = row.value().get(METRICS) if METRICS in fields else None
    of_rollout = _OF_ROLLOUTS.union(metrics if isinstance(metrics, list) else ())
    return {name: value for name, value in fields.items() if name not in of_rollout}
