"""Values as YAML text on which YAML 1.1 and 1.2 parsers agree.

`yes`, `0755`, `12:30`, `1_000`, `1e-4` and dates mean different things to different parsers, so a string that
looks like one of them is quoted and a number is never written that way. NaN and infinities become `null`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import TypeAlias

import yaml

from rollbook.records.plain import to_plain
from rollbook.runs.handoff.nodes import NULL_TAG, STR_TAG, Kind, Node

Scalar: TypeAlias = bool | int | float | str | None


class Unset(Enum):
    """Stands for a value that is not known: an existing key becomes `null`, a missing one stays missing."""

    NULL_IF_PRESENT = "null if present"


Value: TypeAlias = "Scalar | Unset | Mapping[str, Value]"
Tree: TypeAlias = "dict[str, Scalar | Tree]"

# Starts with a letter (behind `/`, `./` and `../`), so that it is never a number, a date or an indicator.
_PLAIN = re.compile(r"(?:\.{0,2}/)*[A-Za-z_][A-Za-z0-9_./+=@~-]*")
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"}
_ESCAPED = re.compile(
    r'["\\\x00-\x1f\x7f-\xa0\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufffe\uffff]'
)
_SHORT_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_CORE_NUMBER = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|0o[0-7]+|0x[0-9a-fA-F]+|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)


def plain_scalar(value: object) -> Scalar:
    """None, a bool, an int, a finite float or a str, from whatever a training loop holds."""
    plain = to_plain(value)
    if plain is None or isinstance(plain, bool | int | float | str):
        return plain
    raise TypeError(f"{type(value).__name__} is neither a scalar nor a mapping")


def scalar_text(value: Scalar, quote: str | None = None) -> str:
    """One line of YAML, block or flow; a string takes the quotes asked for where it can."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return _float_text(value)
    if quote == "'" and not _ESCAPED.search(value.replace('"', "").replace("\\", "")):
        return "'" + value.replace("'", "''") + "'"
    if quote is None and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return '"' + _ESCAPED.sub(_escape, value) + '"'


def flow_text(value: Scalar | Tree, *, quoted: bool = False) -> str:
    if isinstance(value, dict):
        return "{" + flow_pairs(value, quoted=quoted) + "}"
    return scalar_text(value, '"' if quoted else None)


def flow_pairs(tree: Tree, *, quoted: bool = False) -> str:
    """`a: 1, b: x`, or `"a": 1, "b": "x"` where the neighbours are JSON."""
    key_quote = '"' if quoted else None
    return ", ".join(f"{scalar_text(k, key_quote)}: {flow_text(v, quoted=quoted)}" for k, v in tree.items())


def block_lines(tree: Tree, column: int, step: int) -> list[str]:
    lines: list[str] = []
    for key, value in tree.items():
        head = " " * column + scalar_text(key) + ":"
        if isinstance(value, dict):
            lines += [head, *block_lines(value, column + step, step)]
        else:
            lines.append(f"{head} {scalar_text(value)}")
    return lines


def already_is(node: Node, value: Scalar) -> bool:
    """The node holds the value, in a spelling that every parser reads as it."""
    if node.kind is not Kind.SCALAR or node.has_tag:
        return False
    if node.style is not None:
        return isinstance(value, str) and node.value == value
    if value is None:
        return node.tag == NULL_TAG
    if isinstance(value, bool):
        return node.value in ("true", "True", "TRUE") if value else node.value in ("false", "False", "FALSE")
    if isinstance(value, int):
        return node.value == str(value)
    if isinstance(value, float):
        return node.tag.endswith(":float") and _reads_as_float(node.value, value)
    return node.tag == STR_TAG and node.value == value and not _CORE_NUMBER.fullmatch(value)


def _reads_as_float(text: str, value: float) -> bool:
    if not _CORE_NUMBER.fullmatch(text):
        return False
    read = yaml.safe_load(text)
    return isinstance(read, float) and repr(read) == repr(value)  # repr keeps -0.0 apart from 0.0


def _float_text(value: float) -> str:
    text = repr(value)
    mantissa, e, exponent = text.partition("e")
    return f"{mantissa}.0e{exponent}" if e and "." not in mantissa else text


def _escape(match: re.Match[str]) -> str:
    character = match.group()
    return _SHORT_ESCAPES.get(character) or f"\\u{ord(character):04x}"
