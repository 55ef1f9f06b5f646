"""What a dataset holds, with what is missing beside every mean.

For each number: how many rows have it, lack it, or hold something else there, then mean, standard error,
deviation and quantiles; true is 1 and false is 0. Quantiles are exact up to five million rows and by DuckDB's
t-digest beyond. Of a collection the files beside it say what was expected and what failed. Memory is bounded:
what does not fit goes to the disk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from rollbook.data.coverage import planned_by
from rollbook.data.job import DataJob
from rollbook.data.progress import NO_PROGRESS, Progress
from rollbook.query.connection import Kept
from rollbook.query.session import Session
from rollbook.query.sql import literal
from rollbook.records.datasets import failures_path
from rollbook.records.field_paths import FieldPath, field_path, field_text, json_path
from rollbook.records.identity import KEY, OWN_IDS, PROMPTS, TASK_INDEX
from rollbook.records.numbers import sql_number, std_error
from rollbook.records.rows import read_rows
from rollbook.runs.resolve import Inputs, find_inputs, rows_of

QUANTILES = {"p5": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95}
_EXACT = 5_000_000
_BINS = 10
_STOPS = 20
_NUMBERS = ("BOOLEAN", "BIGINT", "UBIGINT", "HUGEINT", "DOUBLE")  # as DuckDB calls the types of JSON
_Path = tuple[str, ...]
# Fields that say which task a row is of; what begins with an underscore counts nothing.
_NAMES = (KEY, *OWN_IDS, TASK_INDEX)


class FieldStats(msgspec.Struct, kw_only=True):
    field: str
    ok: int
    missing: int
    not_a_number: int
    mean: float | None
    std: float | None  # of a sample: n - 1
    std_error: float | None  # of the mean
    min: float | None
    quantiles: dict[str, float]
    max: float | None


class Histogram(msgspec.Struct):
    low: float
    high: float
    counts: list[int]  # of equal ranges; the last includes `high`


class DataStats(msgspec.Struct, kw_only=True):
    inputs: list[str]
    left_out: dict[str, str]  # files that were skipped, and why
    rows: int
    tasks: int
    rows_without_task: int
    rows_per_task: dict[str, float]  # min, mean, max
    fields: list[FieldStats]
    quantiles: str  # "exact" or "approximate"
    stop_reasons: dict[str, int]
    reward_histogram: Histogram | None
    coverage: dict[str, int]  # expected, ok, failed, missing; empty unless every input has a manifest
    without_manifest: list[str]  # inputs that do not say what was expected
    failures: dict[str, int]  # by kind, of the files beside the inputs


def stats(
    inputs: Sequence[str | Path], *, fields: Sequence[str] = (), progress: Progress = NO_PROGRESS
) -> DataStats:
    """Without `fields`: the reward, the top-level numbers and the token counts."""
    found = find_inputs(inputs)
    with DataJob("stats", found, progress=progress) as job:
        paths = [field_path(text) for text in fields] or _number_fields(job)
        with _numbers(job, paths) as table:
            return _stats(found, table, paths)


def _stats(found: Inputs, table: Kept, paths: Sequence[FieldPath]) -> DataStats:
    rows, tasks, without_task = table.one(
        "select count(*), count(distinct task), count(*) filter (task is null) from numbers"
    )
    is_exact = rows <= _EXACT
    described = [_describe(table, place, field_text(path), is_exact) for place, path in enumerate(paths)]
    rewards = [place for place, path in enumerate(paths) if list(path) == ["reward"]]
    planned = planned_by(found.paths)
    return DataStats(
        inputs=[str(path) for path in found.paths],
        left_out={str(path): why for path, why in found.skipped},
        rows=rows,
        tasks=tasks,
        rows_without_task=without_task,
        rows_per_task=_rows_per_task(table),
        fields=described,
        quantiles="exact" if is_exact else "approximate",
        stop_reasons=_stop_reasons(table),
        reward_histogram=_histogram(table, rewards[0], described[rewards[0]]) if rewards else None,
        coverage=planned.coverage(rows),
        without_manifest=[str(path) for path in planned.without],
        failures=_failures(found.paths),
    )


def _number_fields(job: DataJob) -> list[FieldPath]:
    """The reward, and whatever is a number, true or false in any row at its top or among its token counts."""
    likely, _ = _look(job, "(select row from rollouts limit 1000)", [("reward",)])
    paths, numbers = _look(job, "rollouts", [("reward",), *likely])
    if others := paths - likely:
        numbers |= _look(job, "rollouts", list(others))[1]
    return sorted(numbers | {("reward",)}, key=lambda path: (path != ("reward",), len(path), path))


def _look(job: DataJob, source: str, paths: list[_Path]) -> tuple[set[_Path], set[_Path]]:
    """All fields at the top of rows and among their token counts, and which of `paths` are ever numbers."""
    keys = "json_keys(row, ['$', '$.response.usage'])"
    found: set[_Path] = set()
    numbers: set[_Path] = set()
    sql = f"select distinct {keys}, json_type(row, {_listed(paths)}) from {source}"
    for batch in _session(job, "looking for numbers").run(sql).batches:
        for (top, usage), kinds in batch:
            found |= {(name,) for name in top if not name.startswith("_") and name not in _NAMES}
            found |= {("response", "usage", name) for name in usage or ()}
            numbers |= {path for path, kind in zip(paths, kinds, strict=True) if kind in _NUMBERS}
    return found, numbers


def _numbers(job: DataJob, paths: Sequence[FieldPath]) -> Kept:
    """The table `numbers`: columns f0, f1, ... of the fields, `task` (a hash) and `stop`.

    A field is null where it is missing, and NaN where it holds something else.
    """
    numbers = "".join(f"{sql_number(f'v{place}::varchar')} as f{place}, " for place in range(len(paths)))
    # A row that says neither whose it is nor what was asked is of no task; its name is but a hash of itself.
    fields = _listed([name] for name in (*_NAMES, *PROMPTS))
    says_nothing = f"list_filter(json_type(row, {fields}), lambda kind: kind <> 'NULL') = []"
    task = f"case when starts_with(task_id, 'row-') and {says_nothing} then null else hash(task_id) end"
    sql = f"select {numbers}{task} as task, stop_reason as stop from rollouts"
    return _session(job, "scanning", paths).keep(sql, "numbers")


def _session(job: DataJob, what: str, values: Sequence[FieldPath] = ()) -> Session:
    return Session(rows_of(job.ends), scratch=job.scratch, watch=job.watch(what), values=values)


def _listed(paths: Iterable[FieldPath]) -> str:
    return f"[{', '.join(literal(json_path(path)) for path in paths)}]"


def _describe(table: Kept, place: int, text: str, is_exact: bool) -> FieldStats:
    number = f"f{place}"
    is_there = f"filter (not isnan({number}))"
    quantile = "quantile_cont" if is_exact else "approx_quantile"
    ok, missing, other, mean, std, least, most, quantiles = table.one(
        f"select count({number}) {is_there}, count(*) - count({number}), count(*) filter (isnan({number})),"
        f" favg({number}) {is_there}, stddev_samp({number}) {is_there},"
        f" min({number}) {is_there}, max({number}) {is_there},"
        f" {quantile}({number}, {list(QUANTILES.values())}) {is_there} from numbers"
    )
    return FieldStats(
        field=text,
        ok=ok,
        missing=missing,
        not_a_number=other,
        mean=mean,
        std=std,
        std_error=std_error(std, ok),
        min=least,
        quantiles=dict(zip(QUANTILES, quantiles or (), strict=False)),
        max=most,
    )


def _rows_per_task(table: Kept) -> dict[str, float]:
    least, mean, most = table.one(
        "select min(n), avg(n), max(n)"
        " from (select count(*) n from numbers where task is not null group by task)"
    )
    return {} if least is None else {"min": least, "mean": mean, "max": most}


def _stop_reasons(table: Kept) -> dict[str, int]:
    question = "from numbers where stop is not null group by stop order by n desc, stop"
    reasons = list(table.ask(f"select stop, count(*) as n {question}"))
    shown = dict(reasons[:_STOPS])
    if rest := sum(count for _, count in reasons[_STOPS:]):
        shown["(others)"] = rest
    return shown


def _histogram(table: Kept, place: int, rewards: FieldStats) -> Histogram | None:
    low, high = rewards.min, rewards.max
    if low is None or high is None:
        return None
    if low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    elif low == high:
        high = low + 1.0
    number = f"f{place}"
    counted = table.ask(
        f"select least({_BINS - 1}, floor(({number} - ?) / ? * {_BINS}))::int bin, count(*) from numbers"
        f" where {number} is not null and not isnan({number}) group by bin",
        [low, high - low],
    )
    counts = Counter(dict(counted))
    return Histogram(low, high, [counts[place] for place in range(_BINS)])


def _failures(paths: Sequence[Path]) -> dict[str, int]:
    kinds: Counter[str] = Counter()
    for path in paths:
        beside = failures_path(path)
        if not beside.exists() or beside == path:
            continue
        for row in read_rows(beside):
            kind = row.value().get("kind")
            kinds[kind if isinstance(kind, str) else "unknown"] += 1
    return dict(kinds.most_common())
