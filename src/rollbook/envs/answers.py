"""Reading an answer: the last number in a text, and whether two numbers are the same.

Both run in time linear in the text, so they may run in the event loop on anything a model says. What is
expected must be one number and nothing else: "about 7 of 1000" could mean either.
"""

from __future__ import annotations

import decimal
import math
import re
from collections import deque
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

_CURRENCIES = "$¢£¤¥" + "".join(map(chr, range(0x20A0, 0x20D0)))  # those, and Unicode's block of them
_ADORNMENTS = dict.fromkeys(map(ord, "," + _CURRENCIES))  # not part of a number's value
_EXPONENT = r"(?:[eE][-+]?\d{1,6}(?!\w))?"
# A sign belongs to the number unless something comes before it: "10-5" ends in 5, "x = -5" in -5.
_NUMBER = re.compile(
    rf"(?:(?<![\w).])[-+][{_CURRENCIES}]?)?"
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w).])\.\d+)" + _EXPONENT,
    re.ASCII,
)
_WHOLE = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_ONE_NUMBER = re.compile(
    rf"(?:(?P<sign>[-+])[{_CURRENCIES}]?|\\?[{_CURRENCIES}](?:(?P<inner_sign>[-+])|\s?))?"
    rf"(?P<size>{_WHOLE}/0*[1-9]\d*|(?:{_WHOLE}(?:\.\d*)?|\.\d+){_EXPONENT})"
    rf"(?:\s?\\?[%{_CURRENCIES}])?",
    re.ASCII,
)
_DIGITS = "0123456789"
_IN_A_NUMBER = _DIGITS + "+-,./eE" + _CURRENCIES  # every character that one may hold
_SHOWN = 200  # characters
_SOLUTION_END = "####"  # before the answer, in the solutions of GSM8K
_EXACT = decimal.Context(prec=decimal.MAX_PREC, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN)
_CLOSE = decimal.Context(prec=34, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN, traps=[])


def last_number(text: str) -> str | None:
    """The last number a text names, without thousands separators; a fraction such as 3/4 is one."""
    text = text.replace("\N{MINUS SIGN}", "-")
    end = max(map(text.rfind, _DIGITS)) + 1
    # What comes before the last run of such characters cannot belong to the last number.
    start = len(text[:end].rstrip(_IN_A_NUMBER))
    matches = deque(_NUMBER.finditer(text, start), maxlen=2)
    if not matches:
        return None
    last = _plain(matches[-1].group())
    if len(matches) == 2 and text[matches[0].end() : matches[1].start()] == "/":
        above = _plain(matches[0].group())
        if above.lstrip("+-").isdigit() and last.strip("0").isdigit() and _stands_alone(matches[0]):
            return f"{above}/{last}"
    return last


def same_number(given: str, expected: str, tolerance: float = 0.0) -> bool:
    """Whether two decimal numbers or fractions are equal, exactly or within an absolute tolerance."""
    if given.isdecimal() and expected.isdecimal() and tolerance <= 0:  # most are
        return given.lstrip("0") == expected.lstrip("0")
    try:
        (above, below), (other_above, other_below) = _parts(given), _parts(expected)
    except InvalidOperation:
        return False
    if _EXACT.multiply(above, other_below) == _EXACT.multiply(other_above, below):
        return True
    if tolerance <= 0:
        return False
    one, other = _CLOSE.divide(above, below), _CLOSE.divide(other_above, other_below)
    return math.isclose(one, other, rel_tol=0.0, abs_tol=tolerance)


def as_number(value: Any, where: str) -> str:
    """An expected answer as a number, or an error that names where it is."""
    text = str(value).rpartition(_SOLUTION_END)[2].replace("\N{MINUS SIGN}", "-").strip()
    number = _ONE_NUMBER.fullmatch(text)
    if isinstance(value, bool) or number is None:
        raise ValueError(
            f"{where} is {value!r}, which is not one number; write it like 42, -1,234.5, 1.5e3, 50%, 1/2 "
            f"or {_SOLUTION_END} 42"
        )
    return (number["sign"] or number["inner_sign"] or "") + _plain(number["size"])


def _plain(number: str) -> str:
    return number.translate(_ADORNMENTS)


def _stands_alone(above: re.Match[str]) -> bool:
    """Whether a fraction may begin here: not within 3/4/2024 or v1.2/3, nor in a mixed number as 2 3/4."""
    before = above.string[max(0, above.start() - 2) : above.start()]
    return not re.search(r"(?:[a-zA-Z./)]|\d )\Z", before)


def _parts(number: str) -> tuple[Decimal, Decimal]:
    above, _, below = number.partition("/")
    return Decimal(above), Decimal(below or 1)


def beginning(text: str) -> str:
    """Enough of a text, quoted, to know it again in a message."""
    return repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r}..."


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
