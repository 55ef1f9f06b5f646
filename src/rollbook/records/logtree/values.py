"""What a rollout hands over as text or plain JSON values.

A log call sits in the middle of somebody's training step, so nothing that is logged may raise; containers are
copied, because callers go on appending to the very message list they logged.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rollbook.records import plain


def to_text(value: object) -> str:
    """Text, of a numpy or torch scalar that of its number."""
    return value if type(value) is str else plain.to_text(_unboxed(value))


def to_plain(value: object) -> Any:
    """A copy made of None, bool, int, float, str, list and dict only; numbers may be NaN."""
    return plain.to_plain(value, keep_nonfinite=True)


def drained(value: object) -> object:
    """The items of a generator; anything else unchanged."""
    try:
        return list(value) if isinstance(value, Iterator) else value
    except Exception as error:
        return plain.unshowable(value, error)


def _unboxed(value: object) -> object:
    try:
        item = getattr(value, "item", None)
        inner = item() if callable(item) else value
        return inner if isinstance(inner, bool | int | float | str) else value
    except Exception:  # an array of several elements, or a proxy without its object: it shows itself
        return value
