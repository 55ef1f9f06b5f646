"""Whatever a rollout hands over becomes text or plain JSON values, and never an exception.

A log call sits in the middle of somebody's training step: an audio part, a tensor, a lone surrogate or
an object whose `__repr__` fails must leave a readable trace of itself, not a crash. Containers are copied,
because callers go on appending to the very message list they logged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

# Deeper values are kept as text: JSON readers give up at a few hundred levels.
MAX_NESTING = 64


def to_text(value: object) -> str:
    if type(value) is str:
        return value
    try:
        if isinstance(value, (bytes, bytearray, memoryview)):
            return bytes(value).decode("utf-8", "replace")
        # A plain str, not a subclass that carries behaviour along.
        return str.__str__(str(_unboxed(value)))
    except Exception as error:
        return _unshowable(value, error)


def to_plain(value: object) -> Any:
    """A copy made of None, bool, int, float, str, list and dict only."""
    return _to_plain(value, ())


def drained(value: object) -> object:
    """The items of a generator; anything else unchanged."""
    try:
        return list(value) if isinstance(value, Iterator) else value
    except Exception as error:
        return _unshowable(value, error)


def _to_plain(value: object, ancestors: tuple[int, ...]) -> Any:
    kind = type(value)
    if kind is str or kind is int or kind is float or kind is bool or value is None:
        return value
    try:
        if kind is dict or kind is list:  # nearly everything is
            return _copied_container(value, ancestors)
        return _copied(value, ancestors)
    except Exception as error:
        return _unshowable(value, error)


def _copied(value: object, ancestors: tuple[int, ...]) -> Any:
    value = _unboxed(value)
    if value is None or isinstance(value, bool):
        return value
    # Subclasses (enums, numpy's float64) are reduced to the number or the text they are.
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, (str, bytes, bytearray, memoryview)):
        return to_text(value)
    return _copied_container(value, ancestors)


def _copied_container(value: object, ancestors: tuple[int, ...]) -> Any:
    fields = _fields(value)
    if fields is None and not isinstance(value, (Sequence, Set)):
        return to_text(value)
    if id(value) in ancestors:
        return "<refers to itself>"
    if len(ancestors) >= MAX_NESTING:
        return to_text(value)
    inner = (*ancestors, id(value))
    if fields is not None:
        return {to_text(key): _to_plain(item, inner) for key, item in fields.items()}
    assert isinstance(value, (Sequence, Set))
    return [_to_plain(item, inner) for item in value]


def _fields(value: object) -> Mapping[Any, Any] | None:
    """The named fields of dicts, dataclasses, pydantic models and msgspec structs."""
    if isinstance(value, dict):
        return value
    if isinstance(value, (list, type)):
        return None
    if isinstance(value, Mapping):
        return value
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    dump = getattr(value, "model_dump", None)
    if callable(dump):
        dumped = dump()
        return dumped if isinstance(dumped, Mapping) else None
    names = getattr(value, "__struct_fields__", None)
    if isinstance(names, tuple):
        return {name: getattr(value, name) for name in names}
    return None


def _unboxed(value: object) -> object:
    """The Python number inside a numpy or torch scalar; anything else unchanged."""
    item = getattr(value, "item", None)
    if not callable(item):
        return value
    try:
        inner = item()
    except Exception:  # an array of several elements: it is shown as text instead
        return value
    return inner if isinstance(inner, (bool, int, float, str)) else value


def _unshowable(value: object, error: Exception) -> str:
    return f"<{type(value).__name__} that cannot be shown: {type(error).__name__}>"
