"""The rows for which a condition holds, byte for byte and in their order.

Every other row is counted: `dropped` where the condition is false, `unanswerable` where the row does not say
(a missing field, a value of another type), with the first places. With `rejected` they go to a file as well,
so that no row of the input is in neither. A condition that not one row answers is a slip and an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollbook.data.expression import Expression
from rollbook.data.job import DataJob, DataManifest
from rollbook.errors import UsageError
from rollbook.records.rows import Progress

_PLACES = 5
_FIELDS_SHOWN = 30
_REASONS = 100  # texts of the expression and names of types: few, but nothing here may grow with the rows


def filter_rows(
    inputs: Sequence[str | Path],
    output: Path,
    *,
    where: str,
    rejected: Path | None = None,
    overwrite: bool = False,
    advance: Progress = lambda _: None,
) -> DataManifest:
    condition = Expression(where)
    reasons: Counter[str] = Counter()
    places: list[str] = []
    with DataJob(
        "filter",
        inputs,
        output,
        also=[rejected] if rejected is not None else [],
        arguments={"where": where, "rejected": str(rejected) if rejected is not None else None},
        overwrite=overwrite,
        advance=advance,
    ) as job:
        others = job.also[0] if job.also else None
        value: dict[str, Any] = {}
        for row in job.rows():
            value = row.value()
            answer = condition.answer(value)
            if answer:
                job.write(row.data)
                continue
            if answer is None:
                job.count("unanswerable")
                if len(reasons) < _REASONS or condition.why in reasons:
                    reasons[condition.why] += 1
                if len(places) < _PLACES:
                    places.append(f"{row.path}:{row.number}: {condition.why}")
            else:
                job.count("dropped")
            if others is not None:
                others.write(row.data)
        if places and job.counts["unanswerable"] == job.rows_in:
            known = ", ".join(list(value)[:_FIELDS_SHOWN])
            raise UsageError(f"not one row answers this: {places[0]}\nthe fields of the last row: {known}")
        if places:
            job.manifest.details = {"unanswerable": dict(reasons.most_common()), "first_places": places}
    return job.manifest
