"""The functions a condition may call. Each takes the values of a row and says None where they are of a kind
it has no answer for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rollbook.records.numbers import is_number

_MANY = 20


class Trouble:
    """What first kept the present row from having an answer."""

    def __init__(self) -> None:
        self.first: str | None = None

    def add(self, why: str) -> None:
        if self.first is None:
            self.first = why

    def clear(self) -> None:
        self.first = None


class Function(NamedTuple):
    usage: str
    least: int
    most: int
    apply: Callable[..., Any]


def type_name(value: Any) -> str:
    """The name of a value's type as JSON has it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    kinds = {str: "text", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return kinds.get(type(value), type(value).__name__)


def regex_test(
    subject: Callable[[Any], Any], pattern: str, text: str, trouble: Trouble
) -> Callable[[Any], Any]:
    """By RE2, whose time is linear: text that a model wrote could hang a search that backtracks."""
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        pc.match_substring_regex(pa.scalar(""), pattern=pattern)
    except pa.ArrowInvalid as error:
        raise ValueError(str(error)) from None

    def matches(row: Any) -> Any:
        value = subject(row)
        if value is None:
            return None
        if not isinstance(value, str):
            return trouble.add(f"{text}: of {type_name(value)}")
        return pc.match_substring_regex(pa.scalar(value), pattern=pattern).as_py()

    return matches


def _length(value: Any) -> int | None:
    return len(value) if isinstance(value, str | list | Mapping) else None


def _lower(value: Any) -> str | None:
    return value.lower() if isinstance(value, str) else None


def _contains(text: Any, part: Any) -> bool | None:
    return part in text if isinstance(text, str) and isinstance(part, str) else None


def _startswith(text: Any, start: Any) -> bool | None:
    return text.startswith(start) if isinstance(text, str) and isinstance(start, str) else None


def _absolute(value: Any) -> Any:
    return abs(value) if is_number(value) else None


def _extreme(choose: Callable[[Any], Any]) -> Callable[..., Any]:
    def extreme(*values: Any) -> Any:
        numbers = values[0] if len(values) == 1 and isinstance(values[0], list) else values
        return choose(numbers) if numbers and all(map(is_number, numbers)) else None

    return extreme


FUNCTIONS = {
    "abs": Function("abs(number)", 1, 1, _absolute),
    "contains": Function("contains(text, part)", 2, 2, _contains),
    "len": Function("len(text, list or object)", 1, 1, _length),
    "lower": Function("lower(text)", 1, 1, _lower),
    "max": Function("max(a, b) or max(list)", 1, _MANY, _extreme(max)),
    "min": Function("min(a, b) or min(list)", 1, _MANY, _extreme(min)),
    "startswith": Function("startswith(text, start)", 2, 2, _startswith),
}
