"""The rows for which a condition holds, byte for byte and in their order.

A condition is SQL over the columns of `rollouts`, and `row.a.b[0]` is any other field. Every row that is not
kept is counted: `dropped` where the condition is false, `unanswerable` where it is null (a missing field) or
an error (a text where a number should be), with the first places. With `rejected` these rows go to a file of
their own. A condition that has no answer for any row is a mistake and an error.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path

from rollbook.data.job import DataJob
from rollbook.data.progress import NO_PROGRESS, Progress
from rollbook.data.rollout_table import rollout_table, rows_with
from rollbook.errors import UsageError
from rollbook.query.connection import Kept
from rollbook.query.guard import check_expression
from rollbook.query.session import Session
from rollbook.records.datasets import DataManifest
from rollbook.records.rows import read_rows
from rollbook.runs.resolve import rows_of

_PLACES = 5
_FIELDS_SHOWN = 30
_IN_SQL = {  # what other languages call it
    r"\bhas\s*\(": "x is not null",
    r"\bmatches\s*\(": "regexp_matches(x, 'pattern')",
    r"\bstartswith\s*\(": "starts_with(x, 'text')",
    r"\b(any|all)\s*\(": "list_contains(row->>'$.response.output[*].type', 'function_call')",
    r"[!=]=\s*(null|None)\b": "x is null, x is not null",
    r'"': "write texts in single quotes: 'text'",
}


def filter_rows(
    inputs: Sequence[str | Path],
    output: Path,
    *,
    where: str,
    rejected: Path | None = None,
    overwrite: bool = False,
    progress: Progress = NO_PROGRESS,
) -> DataManifest:
    check_expression(where)
    places: list[str] = []
    with (
        DataJob(
            "filter",
            inputs,
            output,
            extra_outputs=[rejected],
            arguments={"where": where, "rejected": str(rejected) if rejected is not None else None},
            overwrite=overwrite,
            progress=progress,
        ) as job,
        _answers(job, where) as table,
    ):
        answers = (answer for (answer,) in table.ask("select answer from kept order by n"))
        for row, answer in rows_with(job, answers):
            if answer:
                job.write(row.data)
                continue
            job.count("unanswerable" if answer is None else "dropped")
            if answer is None and len(places) < _PLACES:
                places.append(f"{row.path}:{row.number}")
            if rejected is not None:
                job.outputs[1].write(row.data)
        if places:
            job.manifest.details = {"first_places": places}
    return job.manifest


def _answers(job: DataJob, where: str) -> Kept:
    """The table of answers: true, false or null."""
    # What holds a question of its own cannot be tried row by row: there an error ends it.
    trials = (f"TRY(\n{where}\n)", f"(\n{where}\n)")
    try:
        for trial in trials:
            try:
                truth = f"CASE ({trial})::VARCHAR WHEN 'true' THEN true WHEN 'false' THEN false END"
                table = rollout_table(job, f"{truth} AS answer", numbered=True)
                break
            except UsageError as error:
                if trial is trials[-1] or "TRY" not in str(error):
                    raise
        answered, rows = table.one("select count(answer), count(*) from kept")
        if rows and not answered:
            raise UsageError(_why_unanswered(job, where))
    except UsageError as error:
        raise UsageError(f"{error}\n{_hints(job, where, str(error))}") from error
    return table


def _why_unanswered(job: DataJob, where: str) -> str:
    try:
        [[(value,)]] = Session(rows_of(job.ends)).run(f"SELECT (\n{where}\n) FROM rollouts LIMIT 1").batches
        why = "it is null" if value is None else f"it is {value!r}, neither true nor false"
    except UsageError as error:
        why = str(error).splitlines()[0]
    return f"the condition could not be evaluated on any row (first: {job.paths[0]}:1: {why})"


def _hints(job: DataJob, where: str, error: str) -> str:
    first = next(read_rows(job.paths[0]), None)
    fields = list(first.value()) if first is not None else []
    hints = [f"in SQL: {sql}" for pattern, sql in _IN_SQL.items() if re.search(pattern, where)]
    unknown = re.findall(r'Referenced column "(\w+)"', error)
    hints += [f"{name} is a field and no column; write row.{name}" for name in unknown if name in fields]
    for name in dict.fromkeys(re.findall(r"\brow\.(\w+)", where)):
        if name not in fields and (near := difflib.get_close_matches(name, fields, n=1)):
            hints.append(f"no row.{name} in the first row; did you mean row.{near[0]}?")
    return "\n".join([*hints, f"fields of the first row: {', '.join(fields[:_FIELDS_SHOWN])}"])
