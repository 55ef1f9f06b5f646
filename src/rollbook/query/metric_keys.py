"""The columns of `metrics`: one for every key that occurs on any line of any file.

All lines are read for it, because a metric may first appear on the last one. Other systems' names stand
beside the documented ones (`optim/entropy` is also `entropy`), so that runs of several systems compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from rollbook.query.scan import ROW
from rollbook.query.sql import literal, quoted
from rollbook.records.field_paths import json_path
from rollbook.records.jsonl import read_lines
from rollbook.records.metrics import ALIASES
from rollbook.records.record import NONFINITE, decode_line
from rollbook.runs.resolve import DataFile

_TAKEN = ("run", "step", "iteration", "file")
_WHOLE, _NUMBER, _TRUTH, _TEXT = "BIGINT", "DOUBLE", "BOOLEAN", "VARCHAR"
_LEARNING_RATE = {"lr": "optim/lr"}  # as trainer_log.jsonl has it


@dataclass(frozen=True)
class MetricColumns:
    types: dict[str, str]  # of every key
    fields: dict[str, str]  # SQL does not tell `Loss` from `loss`: the first of each is a field of a struct
    selected: dict[str, str]  # what the view shows: a column and where it comes from

    def value_of(self, key: str) -> str:
        if key in self.fields:
            return f"_line.{quoted(key)}"
        return f"({ROW}->>{literal(json_path([key]))})::{self.types[key]}"

    def of(self, records: str) -> str:
        """A FROM clause with the values of the lines, as the struct `_line`."""
        shape = {key: ["VARCHAR"] if kind == "VARCHAR[]" else kind for key, kind in self.fields.items()}
        text = literal(orjson.dumps(shape).decode())
        return f"(SELECT *, json_transform({ROW}, {text}) AS _line FROM {records})"


def metric_columns(files: Sequence[DataFile]) -> MetricColumns:
    types = _types(files)
    first: dict[str, str] = {}
    for key in types:
        first.setdefault(key.lower(), key)
    columns = MetricColumns(types, {key: types[key] for key in first.values()}, {})
    selected, taken = columns.selected, set(_TAKEN)
    for key in [*columns.fields, *(key for key in types if key not in columns.fields)]:
        if key != "step":
            selected[_free_name(key, taken)] = columns.value_of(key)
    for key, name in _documented(columns.fields):
        if name.lower() not in taken:
            selected[_free_name(name, taken)] = columns.value_of(key)
        elif name in columns.fields and {types[key], types[name]} <= {_WHOLE, _NUMBER}:
            selected[name] = f"coalesce({selected[name]}, {columns.value_of(key)})"
    return columns


def _types(files: Sequence[DataFile]) -> dict[str, str]:
    seen: dict[str, set[str]] = {}
    for file in files:
        for line in read_lines(file.path):
            if not line.data.strip():
                continue
            row = decode_line(file.path, line)
            for key, value in row.items():
                if not key:  # no column can be called nothing
                    continue
                kinds = seen.get(key)
                if kinds is None:
                    kinds = seen[key] = set()
                kinds.add(_kind(value))
            for key in row.get(NONFINITE) or ():
                if key in seen:
                    seen[key].add(_NUMBER)
    return {key: _type(key, kinds) for key, kinds in seen.items()}


def _free_name(key: str, taken: set[str]) -> str:
    name = key
    while name.lower() in taken:
        name += "_"
    taken.add(name.lower())
    return name


def _documented(types: dict[str, str]) -> list[tuple[str, str]]:
    """(what a file calls a metric, its documented name)."""
    aliases = ALIASES | _LEARNING_RATE
    pairs = [(key, aliases[key]) for key in types if key in aliases]
    totals = (key for key in types if key.startswith("time/") and key.endswith(":total"))
    return pairs + [(key, key.removesuffix(":total")) for key in totals]


def _kind(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return _TRUTH
    if isinstance(value, int):
        return _WHOLE if -(2**63) <= value < 2**63 else _NUMBER
    if isinstance(value, float):
        return _NUMBER
    return _TEXT if isinstance(value, str) else "JSON"


def _type(key: str, kinds: set[str]) -> str:
    kinds = kinds - {""}
    if key == NONFINITE:
        return "VARCHAR[]"
    if len(kinds) == 1:
        return next(iter(kinds))
    # A value that was never finite is still a number.
    return _NUMBER if kinds <= {_WHOLE, _NUMBER} else "JSON"
