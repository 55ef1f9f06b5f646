"""Values as they come from a training loop, made into plain data that JSON can hold.

NumPy and torch scalars become numbers; NaN and infinities become `null` and their keys are listed under
`nonfinite`, so a diverged loss is visible and the line still parses; lone surrogates, which tokenizers
produce, become U+FFFD. Nothing a loop logs may kill the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Mapping
from datetime import UTC, date, datetime
from pathlib import PurePath
from typing import Any

import msgspec
import orjson

Plain = (
    Any  # None, bool, int, float, str, list, dict: there is no recursive alias that mypy and msgspec share
)

_DEPTH_LIMIT = 100
_LINE_SEPARATORS = [(char.encode(), f"\\u{ord(char):04x}".encode()) for char in "\u2028\u2029\x85"]
_INT64 = range(-(2**63), 2**64)


def utc_now() -> str:
    """The present as records hold it: ISO 8601, UTC, microseconds."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def to_plain(value: Any, key: str = "", nonfinite: list[str] | None = None, depth: int = 0) -> Plain:
    """Plain data for any value; the keys of non-finite numbers are added to `nonfinite`."""
    kind = type(value)
    if kind is str or kind is bool or value is None:
        return value
    if kind is float:
        if value - value == 0.0:
            return value
        if nonfinite is not None:
            nonfinite.append(key)
        return None
    if kind is int:
        return value if value in _INT64 else str(value)
    if depth > _DEPTH_LIMIT:
        return "[too deep]"
    if kind is dict or isinstance(value, Mapping):
        return _mapping_to_plain(value, key, nonfinite, depth)
    if isinstance(value, set | frozenset):
        value = sorted(value, key=_safe_str)
    if isinstance(value, list | tuple):
        return [to_plain(v, _join(key, i), nonfinite, depth + 1) for i, v in enumerate(value)]
    return _unusual_to_plain(value, key, nonfinite, depth)


def _mapping_to_plain(value: Mapping[Any, Any], key: str, nonfinite: list[str] | None, depth: int) -> Plain:
    plain = {}
    for name, item in value.items():
        kind = type(item)
        # Most values of a record are one of these: taking them here spares a call and a key path each.
        if type(name) is str and (
            kind is str
            or item is None
            or kind is bool
            or (kind is float and item - item == 0.0)
            or (kind is int and item in _INT64)
        ):
            plain[name] = item
        else:
            plain[str(name)] = to_plain(item, _join(key, name), nonfinite, depth + 1)
    return plain


def _unusual_to_plain(value: Any, key: str, nonfinite: list[str] | None, depth: int) -> Plain:
    if isinstance(value, enum.Enum):
        return to_plain(value.value, key, nonfinite, depth + 1)
    if isinstance(value, bool | int | float | str):  # subclasses: np.float64 is a float
        base = next(base for base in (bool, int, float, str) if isinstance(value, base))
        return to_plain(base(value), key, nonfinite, depth + 1)
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode("utf-8", "replace")
    if isinstance(value, msgspec.Struct):
        return to_plain(msgspec.structs.asdict(value), key, nonfinite, depth + 1)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return to_plain(fields, key, nonfinite, depth + 1)
    # NumPy, torch, JAX: a scalar has item(), an array tolist(); an array of one element has both.
    methods = ("tolist", "item") if getattr(value, "shape", ()) else ("item", "tolist")
    for convert in (getattr(value, method, None) for method in methods):
        if callable(convert):
            with contextlib.suppress(Exception):  # an item() of another meaning, or one that fails
                converted = convert()
                if type(converted) is not type(value):
                    return to_plain(converted, key, nonfinite, depth + 1)
    return _safe_str(value)


def encode(plain: Plain) -> bytes:
    """Plain data as one line of compact UTF-8 JSON.

    A line stays one line for readers that also split at U+2028, U+2029 or U+0085: those are escaped.
    """
    try:
        line = orjson.dumps(plain)
    except TypeError:
        line = orjson.dumps(_without_surrogates(plain))
    for separator, escaped in _LINE_SEPARATORS:
        if separator in line:
            line = line.replace(separator, escaped)
    return line


def is_finite(value: float) -> bool:
    return value - value == 0.0


def _without_surrogates(plain: Plain) -> Plain:
    if isinstance(plain, str):
        if not _has_surrogate(plain):
            return plain
        return plain.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(plain, list):
        return [_without_surrogates(item) for item in plain]
    if isinstance(plain, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in plain.items()}
    return plain


def _has_surrogate(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def _join(key: str, part: object) -> str:
    return f"{key}.{part}" if key else str(part)


def _safe_str(value: object) -> str:
    try:
        return str(value)
    except Exception as error:
        return f"[{type(value).__qualname__} whose text failed: {type(error).__name__}]"
