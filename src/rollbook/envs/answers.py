"""Reading an answer: the last number in a text, and whether two numbers are the same.

Both run in time linear in the text, so they may run in the event loop on anything a model says.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

# A sign belongs to the number unless something stands before it: "10-5" ends in 5, "x = -5" in -5.
_NUMBER = re.compile(
    r"(?:(?<![\w).])[-+])?"
    r"(?:\d{1,3}(?:,\d{3})+(?![\d])|\d+)(?:\.\d+)?"
    r"(?:[eE][-+]?\d{1,6}(?![\w]))?",
    re.ASCII,
)
_DIGITS = "0123456789"
_IN_A_NUMBER = _DIGITS + "+-,.eE"  # every character that one may hold


def last_number(text: str) -> str | None:
    """The last number a text names, without thousands separators."""
    text = text.replace("\N{MINUS SIGN}", "-")
    end = max(map(text.rfind, _DIGITS)) + 1
    # What stands before the last run of such characters cannot belong to the last number.
    start = len(text[:end].rstrip(_IN_A_NUMBER))
    matches = deque(_NUMBER.finditer(text, start), maxlen=1)
    return matches[0].group().replace(",", "") if matches else None


def same_number(given: str, expected: str, tolerance: float = 0.0) -> bool:
    """Whether two numbers in decimal notation are equal, exactly or within an absolute tolerance."""
    try:
        one, other = Decimal(given), Decimal(expected)
    except InvalidOperation:
        return False
    if one == other:
        return True
    return tolerance > 0 and math.isclose(one, other, rel_tol=0.0, abs_tol=tolerance)


def as_number(value: Any, where: str) -> str:
    """An expected answer as a number, or an error that names where it stands."""
    text = str(value)
    number = last_number(text.replace("\N{MINUS SIGN}", "-"))
    if isinstance(value, bool) or number is None:
        raise ValueError(f"{where} is {value!r}, which holds no number")
    return number


def look_up(row: Mapping[str, Any], key: str) -> Any:
    """The value of a key, or of a dotted path of keys, in a row."""
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise KeyError(f"the row has no {key!r}; it has: {', '.join(row)}")
        value = value[part]
    return value
