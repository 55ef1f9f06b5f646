"""Fields of a row as people type them, such as `response.usage.output_tokens`, `tags[0]`, `"odd name".x`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rollbook.errors import UsageError

FieldPath = Sequence[str | int]
_NAME = re.compile(r"[\w/@:$-]+")
_STEP = re.compile(rf'(?:^|\.)(?:({_NAME.pattern})|"((?:[^"]|"")+)")|(?!^)\[(-?[0-9]+)\]')


def field_path(text: str) -> FieldPath:
    """`row.` may stand before it, as in a condition."""
    steps: list[str | int] = []
    place = 0
    typed = text.strip().removeprefix("row.")
    while (match := _STEP.match(typed, place)) and match.end() > place:
        name, quoted, number = match.groups()
        steps.append(int(number) if number else name or quoted.replace('""', '"'))
        place = match.end()
    if place < len(typed) or not steps:
        raise UsageError(
            f'{text!r} is not a field; write it like response.usage.output_tokens, tags[0] or "odd name".x'
        )
    return steps


def field_text(path: FieldPath) -> str:
    """What to type for a field."""
    names = (f"[{step}]" if isinstance(step, int) else f".{_quoted(step)}" for step in path)
    return "".join(names).removeprefix(".")


def json_path(path: FieldPath) -> str:
    """The same field for DuckDB's JSON functions."""
    if "*" in path:
        raise UsageError("a key that is called * cannot be asked for: DuckDB takes it for any key")
    steps = (f"[{step}]" if isinstance(step, int) else f".{_escaped(step)}" for step in path)
    return "$" + "".join(steps)


def value_at(row: Any, path: FieldPath) -> Any:
    """None where the path leads nowhere: a missing field is null."""
    for step in path:
        if isinstance(step, str):
            row = row.get(step) if isinstance(row, Mapping) else None
        else:
            row = row[step] if isinstance(row, list) and -len(row) <= step < len(row) else None
        if row is None:
            return None
    return row


def _escaped(name: str) -> str:
    return '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _quoted(name: str) -> str:
    return name if _NAME.fullmatch(name) else '"' + name.replace('"', '""') + '"'
