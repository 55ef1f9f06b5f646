"""Typed records that keep what they do not know.

A record is a msgspec Struct whose unknown keys live in `extra`: a file written by a newer version, or by
someone's own tool, survives a read and a write. On the wire `extra` is flattened to the top level, fields
that are `None` and not `REQUIRED` are left out, and non-finite numbers are `null` with their keys listed
under `nonfinite`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import msgspec
import orjson

from rollbook.errors import BadLineError
from rollbook.records.jsonl import Line, read_lines
from rollbook.records.plain import Plain, encode, is_plain, to_plain
from rollbook.records.versions import made_by_newer

NONFINITE = "nonfinite"
_decode = msgspec.json.Decoder().decode


class Record(msgspec.Struct, kw_only=True):
    REQUIRED: ClassVar[frozenset[str]] = frozenset()  # written even when None
    KNOWN_VERSION: ClassVar[int] = 1  # the newest `schema_version` that can be read; a line may have none

    extra: dict[str, Any] = msgspec.field(default_factory=dict)

    @classmethod
    def from_plain(cls, plain: dict[str, Plain]) -> Self:
        """Raises msgspec.ValidationError, whose text names the key."""
        known = _field_names(cls)
        extra = {key: value for key, value in plain.items() if key not in known}
        record = msgspec.convert({key: plain[key] for key in known if key in plain}, cls)
        record.extra = extra
        return record

    def content(self) -> dict[str, Any]:
        """The keys and values of the line, as they were given; nested records as dicts."""
        required = self.REQUIRED
        values = {
            name: value
            for name in _field_names(type(self))
            if (value := getattr(self, name)) is not None or name in required
        }
        if self.extra:
            values |= {name: value for name, value in self.extra.items() if name not in values}
        return values

    def to_plain(self) -> dict[str, Plain]:
        nonfinite: list[str] = []
        plain: dict[str, Plain] = to_plain(self.content(), "", nonfinite)
        if nonfinite:
            known = plain.get(NONFINITE) or []
            plain[NONFINITE] = [*known, *(name for name in nonfinite if name not in known)]
        return plain

    def encode(self) -> bytes:
        content = self.content()
        try:
            if is_plain(content):
                return encode(content)
        except (TypeError, OverflowError):  # a whole number beyond 64 bits
            pass
        return encode(self.to_plain())


AnyRecord = TypeVar("AnyRecord", bound=Record)


@cache
def _field_names(kind: type[Record]) -> dict[str, None]:
    return dict.fromkeys(name for name in kind.__struct_fields__ if name != "extra")


def decode_line(path: Path, line: Line) -> dict[str, Plain]:
    """The JSON object on a line; numbers that are not finite (NaN, Infinity, 1e999) are null, as ours are."""
    try:
        value = orjson.loads(line.data)
    except orjson.JSONDecodeError as error:
        value = _decode_nonfinite(line.data, error)
        if value is None:
            raise BadLineError(path, line.number, f"not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise BadLineError(path, line.number, "not a JSON object")
    return value


def decode_record(path: Path, line: Line, kind: type[AnyRecord]) -> AnyRecord:
    plain = decode_line(path, line)
    if "schema_version" in plain and (why := made_by_newer(plain["schema_version"], kind.KNOWN_VERSION)):
        raise BadLineError(path, line.number, why)
    try:
        return kind.from_plain(plain)
    except msgspec.ValidationError as error:
        raise BadLineError(path, line.number, f"not a {kind.__name__}: {error}") from None


def read_records(path: Path, kind: type[AnyRecord], *, start: int = 0) -> Iterator[AnyRecord]:
    """Stream the records of a file; a missing file holds none."""
    if path.exists():
        for line in read_lines(path, start=start):
            yield decode_record(path, line, kind)


def decode_json(data: bytes) -> Plain:
    """Like a line, for whole files of other writers; raises ValueError where even that does not help."""
    try:
        value: Plain = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        value = _decode_nonfinite(data, error)
        if value is None:
            raise
    return value


def decode_exactly(data: bytes) -> Plain:
    """The same with whole numbers of any size; others make floats of those past 64 bits."""
    try:
        return _decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):  # or say what is wrong as others do
        return decode_json(data)


def _decode_nonfinite(data: bytes, error: orjson.JSONDecodeError) -> Plain:
    """What orjson refused, if only for a number that is not finite; else None."""
    if b"NaN" not in data and b"Infinity" not in data and "infinity" not in error.msg:
        return None
    try:
        value = json.loads(data)
    except ValueError:
        return None
    nonfinite: list[str] = []
    plain = to_plain(value, "", nonfinite)
    if isinstance(plain, dict) and nonfinite:
        plain[NONFINITE] = nonfinite
    return plain
