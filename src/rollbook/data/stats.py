"""What a dataset holds, with what is missing beside every mean.

For each number: how many rows have it, lack it, or hold something else there, then mean, deviation and
quantiles. Quantiles are exact up to five million rows and by DuckDB's t-digest beyond. Of a collection the
files beside it say what was expected and what failed. Memory is bounded: what does not fit goes to the disk.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import orjson

from rollbook.data.coverage import planned_by
from rollbook.data.expression import field_path
from rollbook.data.number_table import Field, NumberTable
from rollbook.records.datasets import side_file
from rollbook.records.numbers import is_number
from rollbook.records.record import decode_json
from rollbook.records.row_blocks import LineBlock, decode_block, line_blocks
from rollbook.records.rows import Progress, read_rows
from rollbook.runs.resolve import find_inputs

QUANTILES = {"p5": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95}
_EXACT = 5_000_000
_MOST_KEYS = 1000
_ESCAPED = re.compile(r'["\\\x00-\x1f]')
_BINS = 10
_STOPS = 20
_Decode = Callable[[memoryview], list[Any]]


class FieldStats(msgspec.Struct, kw_only=True):
    field: str
    ok: int
    missing: int
    not_a_number: int
    mean: float | None
    std: float | None  # of a sample: n - 1
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
    inputs: Sequence[str | Path], *, fields: Sequence[str] = (), advance: Progress = lambda _: None
) -> DataStats:
    """Without `fields`: the reward, the top-level numbers and the token counts."""
    found = find_inputs(inputs)
    chosen = {text: field_path(text) for text in fields} or _numbers_in(found.paths)
    with NumberTable(list(chosen.values())) as table:
        table.fill(found.paths, advance)
        ((rows, tasks, without_task),) = table.ask(
            "select count(*), count(distinct task), count(*) filter (task is null) from numbers"
        )
        is_exact = rows <= _EXACT
        described = [_describe(table, place, text, is_exact) for place, text in enumerate(chosen)]
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
            reward_histogram=next(
                (
                    _histogram(table, place, one)
                    for place, one in enumerate(described)
                    if one.field == "reward"
                ),
                None,
            ),
            coverage=planned.coverage(rows),
            without_manifest=[str(path) for path in planned.without],
            failures=_failures(found.paths),
        )


def _numbers_in(paths: Sequence[Path]) -> dict[str, Field]:
    numbers = _NumberFields()
    for path in paths:
        numbers.look(path)
    return numbers.found


class _NumberFields:
    """The numbers at the top of rows and among their token counts, found over whole files, reward first.

    A block of lines that holds no key and no number beyond those known is decoded without making anything
    of it; a row is taken apart only where there is something new.
    """

    def __init__(self) -> None:
        self.found: dict[str, Field] = {"reward": ["reward"]}
        self._top: dict[str, bool] = {}  # a key -> whether numbers were seen there
        self._usage: dict[str, bool] = {}
        self._decode: _Decode | None = None

    def look(self, path: Path) -> None:
        if path.suffix not in (".jsonl", ".ndjson"):
            for row in read_rows(path):
                self._note(row.value())
            return
        for block in line_blocks(path):
            if self._decode is None or decode_block(block, self._decode) is None:
                self._take_apart(block)

    def _take_apart(self, block: LineBlock) -> None:
        before = dict(self._top), dict(self._usage)
        for start, end in zip(block.starts.tolist(), block.ends.tolist(), strict=True):
            with contextlib.suppress(ValueError):  # whoever reads the numbers names the line
                value = decode_json(block.data[start:end].tobytes())
                if isinstance(value, dict):
                    self._note(value)
        if before != (self._top, self._usage):
            self._decode = _decoder_of(self._top, self._usage)

    def _note(self, row: Mapping[str, Any]) -> None:
        for name, inner in row.items():
            is_shown = _is_shown(inner)
            self._top[name] = is_shown or self._top.get(name, False)
            if is_shown and not name.startswith("_") and name not in ("id", "task_id"):
                self.found.setdefault(_written(name), [name])
        usage = response.get("usage") if isinstance(response := row.get("response"), Mapping) else None
        for name, inner in usage.items() if isinstance(usage, Mapping) else ():
            is_shown = _is_shown(inner)
            self._usage[name] = is_shown or self._usage.get(name, False)
            if is_shown and name.isidentifier():
                self.found.setdefault(f"response.usage.{name}", ["response", "usage", name])


class _Skipped(msgspec.Struct, gc=False):
    """Any object; what is in it is not looked at."""


_NOT_A_NUMBER: Any = str | bool | list[msgspec.Raw] | None
_ANYTHING: Any = _NOT_A_NUMBER | int | float


def _decoder_of(top: Mapping[str, bool], usage: Mapping[str, bool]) -> _Decode | None:
    """What decodes rows without a key or a number but these, and refuses others; None for too many keys."""
    names = [*top, *usage]
    if len(names) > _MOST_KEYS or any(_ESCAPED.search(name) for name in names):
        return None
    known = {name: msgspec.Raw if number else _NOT_A_NUMBER | _Skipped for name, number in top.items()}
    if "response" in top:
        counts = _strict({name: msgspec.Raw if n else _NOT_A_NUMBER | _Skipped for name, n in usage.items()})
        inside: Any = msgspec.defstruct("_Response", [("usage", _ANYTHING | counts, None)], gc=False)
        known["response"] = (_ANYTHING if top["response"] else _NOT_A_NUMBER) | inside
    return msgspec.json.Decoder(_strict(known)).decode_lines


def _strict(types: Mapping[str, Any]) -> Any:
    """An object that may have these keys and no others."""
    fields = [(f"f{place}", kind, None) for place, kind in enumerate(types.values())]
    renamed = {f"f{place}": name for place, name in enumerate(types)}
    return msgspec.defstruct("_Known", fields, rename=renamed, forbid_unknown_fields=True, gc=False)


def _is_shown(value: object) -> bool:
    """A number that nobody asked for by name; flags are many, and their means say little by themselves."""
    return is_number(value) and not isinstance(value, bool)


def _written(name: str) -> str:
    return name if name.isidentifier() else f"row[{orjson.dumps(name).decode()}]"


def _describe(table: NumberTable, place: int, text: str, is_exact: bool) -> FieldStats:
    number = f"f{place}"
    is_there = f"filter (not isnan({number}))"
    quantile = "quantile_cont" if is_exact else "approx_quantile"
    ((ok, missing, other, mean, std, least, most, quantiles),) = table.ask(
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
        min=least,
        quantiles=dict(zip(QUANTILES, quantiles or (), strict=False)),
        max=most,
    )


def _rows_per_task(table: NumberTable) -> dict[str, float]:
    ((least, mean, most),) = table.ask(
        "select min(n), avg(n), max(n)"
        " from (select count(*) n from numbers where task is not null group by task)"
    )
    return {} if least is None else {"min": least, "mean": mean, "max": most}


def _stop_reasons(table: NumberTable) -> dict[str, int]:
    reasons = table.ask(
        "select stop, count(*) n from numbers where stop is not null group by stop order by n desc, stop"
    )
    shown = dict(reasons[:_STOPS])
    if rest := sum(count for _, count in reasons[_STOPS:]):
        shown["(others)"] = rest
    return shown


def _histogram(table: NumberTable, place: int, rewards: FieldStats) -> Histogram | None:
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
        beside = side_file(path, "_failures.jsonl")
        if not beside.exists() or beside == path:
            continue
        for row in read_rows(beside):
            kind = row.value().get("kind")
            kinds[kind if isinstance(kind, str) else "unknown"] += 1
    return dict(kinds.most_common())
