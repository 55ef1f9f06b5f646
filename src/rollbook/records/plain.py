"""Values as they come from a training loop, made into plain data that JSON can hold.

NumPy and torch scalars become numbers; NaN and infinities become `null` and their keys are listed under
`nonfinite`, so a diverged loss is visible and the line still parses; lone surrogates, which tokenizers
produce, become U+FFFD. Nothing a loop logs may kill the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Mapping, Sequence, Set
from datetime import UTC, date, datetime
from pathlib import PurePath
from typing import Any

import msgspec
import orjson

from rollbook.records.line_secrets import LineSecrets

Plain = (
    Any  # None, bool, int, float, str, list, dict: there is no recursive alias that mypy and msgspec share
)

_DEPTH_LIMIT = 100
_SUSPICIOUSLY_MANY = 20_000  # containers in one value; from then on each is shown
_REPEATS = 3  # so many times more
_LINE_SEPARATORS = [(char.encode(), f"\\u{ord(char):04x}".encode()) for char in "\u2028\u2029\x85"]
_SHALLOW = 10  # where `is_plain` stops looking
_NAMES = frozenset({str})
_WRITTEN_AS_IS = frozenset({str, type(None), bool, int})
_NUMBERS = frozenset({int, float})
_SCALARS = (enum.Enum, bool, int, float, str, PurePath, date, bytes, bytearray, memoryview)
_INT64 = range(-(2**63), 2**64)


def utc_now() -> str:
    """The present as records hold it: ISO 8601, UTC, microseconds."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def unix_time(text: Any) -> float | None:
    """The moment a record's text names; None for anything else."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError):
        return None


def to_plain(
    value: Any, key: str = "", nonfinite: list[str] | None = None, *, keep_nonfinite: bool = False
) -> Plain:
    """A copy as plain data, of any value; the keys of non-finite numbers are added to `nonfinite`.

    A value that holds itself ends where it would begin again, and a web of objects that refer to each other
    ends where it would repeat for ever; a note takes the place of what is left out.
    """
    kind = type(value)
    if kind is str or kind is bool or value is None:
        return value
    return _Walk(nonfinite, keep_nonfinite).plain(value, key)


class _Walk:
    """One pass over one value."""

    __slots__ = ("above", "containers", "keep_nonfinite", "nonfinite", "seen")

    def __init__(self, nonfinite: list[str] | None, keep_nonfinite: bool) -> None:
        self.nonfinite, self.keep_nonfinite = nonfinite, keep_nonfinite
        self.above: set[int] = set()  # the containers around the present value
        self.containers = 0
        # The containers met since there were suspiciously many; kept alive, so that no id is used again.
        self.seen: dict[int, tuple[object, int]] = {}

    def plain(self, value: Any, key: str) -> Plain:
        kind = type(value)
        if kind is str or kind is bool or value is None:
            return value
        if kind is float:
            if value - value == 0.0 or self.keep_nonfinite:
                return value
            if self.nonfinite is not None:
                self.nonfinite.append(key)
            return None
        if kind is int:
            return value if value in _INT64 else _big_number(value)
        if kind is not dict and kind is not list and _is_scalar(value):
            return self._scalar(value, key)
        note = self._why_not_entered(value)
        if note is not None:
            return note
        self.above.add(id(value))
        try:
            return self._content(value, key)
        except Exception as error:  # whatever a class of the user's does when it is looked at
            return unshowable(value, error)
        finally:
            self.above.discard(id(value))

    def _scalar(self, value: Any, key: str) -> Plain:
        if isinstance(value, enum.Enum):
            return self.plain(value.value, key)
        if isinstance(value, bool | int | float | str):  # subclasses: np.float64 is a float
            base = next(base for base in (bool, int, float, str) if isinstance(value, base))
            return self.plain(base(value), key)
        return value.isoformat() if isinstance(value, date) else to_text(value)

    def _why_not_entered(self, value: Any) -> str | None:
        if id(value) in self.above:
            return f"[circular: {type(value).__name__}]"
        if len(self.above) > _DEPTH_LIMIT:
            return "[too deep]"
        self.containers += 1
        if self.containers > _SUSPICIOUSLY_MANY:
            # A tree is this big sometimes; a web of objects would grow with every way through it.
            _, times = self.seen.get(id(value), (value, 0))
            if times >= _REPEATS:
                return f"[repeated: {type(value).__name__}]"
            self.seen[id(value)] = (value, times + 1)
        return None

    def _content(self, value: Any, key: str) -> Plain:
        if type(value) is dict or isinstance(value, Mapping):
            return self._mapping(value, key)
        if isinstance(value, Set):
            value = sorted(value, key=to_text)
        if isinstance(value, Sequence):
            return [
                item if type(item) is str else self.plain(item, _join(key, index))
                for index, item in enumerate(value)
            ]
        if isinstance(value, msgspec.Struct):
            if value.__struct_config__.array_like:
                return self._content(msgspec.structs.astuple(value), key)
            return self._mapping(msgspec.structs.asdict(value), key)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            return self._mapping(fields, key)
        dump = getattr(value, "model_dump", None)
        if callable(dump) and not isinstance(value, type):  # pydantic
            return self.plain(dump(), key)
        # NumPy, torch, JAX: a scalar has item(), an array tolist(); an array of one element has both.
        methods = ("tolist", "item") if getattr(value, "shape", ()) else ("item", "tolist")
        for convert in (getattr(value, method, None) for method in methods):
            if callable(convert):
                with contextlib.suppress(Exception):  # an item() of another meaning, or one that fails
                    converted = convert()
                    if type(converted) is not type(value):
                        return self.plain(converted, key)
        return to_text(value)

    def _mapping(self, value: Mapping[Any, Any], key: str) -> Plain:
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
                text = name if type(name) is str else to_text(name)
                plain[text] = self.plain(item, _join(key, text))
        return plain


def is_plain(value: Any, depth: int = 0) -> bool:
    """Whether `encode` can take the value as it is, which is nearly always so; in doubt it says no.

    It copies nothing, and goes through long lists of numbers at the speed of C. Whole numbers beyond 64 bits
    are overlooked: `encode` raises TypeError on them.
    """
    kind = type(value)
    if kind is dict:
        if depth >= _SHALLOW or not set(map(type, value)) <= _NAMES:
            return False
        for item in value.values():
            if type(item) not in _WRITTEN_AS_IS and not is_plain(item, depth + 1):
                return False
        return True
    if kind is list:
        kinds = set(map(type, value))
        if kinds <= _WRITTEN_AS_IS:
            return True
        if kinds <= _NUMBERS:
            return is_finite(sum(value))
        return depth < _SHALLOW and all(is_plain(item, depth + 1) for item in value)
    if kind is float:
        return bool(value - value == 0.0)
    return kind in _WRITTEN_AS_IS or (isinstance(value, enum.Enum) and type(value.value) is str)


def encode(plain: Plain) -> bytes:
    """Plain data as one line of compact UTF-8 JSON.

    A line stays one line for readers that also split at U+2028, U+2029 or U+0085: those are escaped.
    """
    try:
        line = orjson.dumps(plain)
    except TypeError:
        line = orjson.dumps(_without_surrogates(plain))
    return as_one_line(line)


def encode_document(plain: Plain) -> bytes:
    """Plain data as a file that people read too: JSON with indentation and a newline at its end."""
    try:
        text = orjson.dumps(plain, option=orjson.OPT_INDENT_2)
    except TypeError:
        text = orjson.dumps(_without_surrogates(plain), option=orjson.OPT_INDENT_2)
    return LineSecrets().cleaned_json(text) + b"\n"


def as_one_line(json: bytes) -> bytes:
    """The same JSON, with the characters escaped at which some readers split lines."""
    for separator, escaped in _LINE_SEPARATORS:
        if separator in json:
            json = json.replace(separator, escaped)
    return json


def encode_exactly(value: Any) -> bytes:
    """Any value as one line of JSON, whole numbers of any size as they are; `encode` is for plain data."""
    try:
        return as_one_line(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY))
    except TypeError:  # a torch scalar in a metric, half a character in an answer, a number past 64 bits
        with contextlib.suppress(TypeError, ValueError, RecursionError, msgspec.MsgspecError):
            return as_one_line(msgspec.json.encode(_without_surrogates(value), enc_hook=to_plain))
    return encode(to_plain(value))


def canonical(value: Any) -> bytes:
    """The same bytes for equal values, whatever the order of their keys: what digests are made of."""
    return canonical_of_plain(to_plain(value))


def canonical_of_plain(plain: Plain) -> bytes:
    """The same of what is plain data already."""
    try:
        return orjson.dumps(plain, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        return orjson.dumps(_without_surrogates(plain), option=orjson.OPT_SORT_KEYS)


def is_finite(value: float) -> bool:
    return value - value == 0.0


def _without_surrogates(plain: Plain) -> Plain:
    if isinstance(plain, str):
        return cleaned_text(plain)
    if isinstance(plain, list):
        return [_without_surrogates(item) for item in plain]
    if isinstance(plain, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in plain.items()}
    return plain


def cleaned_text(text: str) -> str:
    """The text with U+FFFD for lone surrogates, which cannot be written: those of odd file names, say."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _join(key: str, part: object) -> str:
    return f"{key}.{part}" if key else str(part)


def to_text(value: object) -> str:
    """The text of any value, which is never an exception."""
    if type(value) is str:
        return value
    try:
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes(value).decode("utf-8", "replace")
        return str.__str__(str(value))  # a plain str, not a subclass that carries behaviour along
    except Exception as error:
        return unshowable(value, error)


def unshowable(value: object, error: Exception) -> str:
    return f"<{type(value).__name__} that cannot be shown: {type(error).__name__}>"


def _big_number(value: int) -> str:
    # Python refuses to write longer ones in decimal, as it would take for ever.
    return str(value) if value.bit_length() < 10_000 else hex(value)


def _is_scalar(value: object) -> bool:
    try:
        return isinstance(value, _SCALARS)
    except Exception:  # a proxy without its object
        return False
