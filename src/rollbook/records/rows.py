"""Rows one at a time from JSON lines, compressed lines and Parquet, each with its place.

Nothing holds a file. Bytes stay bytes until somebody asks for the value, so commands that only choose rows
copy them untouched. Blank lines are skipped and counted; anything else that is no JSON object is an error
that names file and line.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import orjson

from rollbook.errors import BadFileError, BadLineError
from rollbook.records.jsonl import Line
from rollbook.records.plain import encode_exactly
from rollbook.records.record import decode_exactly, decode_line

COMPRESSED = {".zst": "zstd", ".gz": "gzip"}
_CHUNK = 1 << 20
_PARQUET_BATCH = 1024
_DEEPEST = 250  # what every writer of JSON here can write again

OnRead = Callable[[int], None]  # called with the number of bytes that were read since the last call


class Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...


class Row(NamedTuple):
    """One JSON object as it is in its file."""

    data: bytes
    path: Path
    number: int  # of the line, of the row of a Parquet file, or of the element of an array, from 1
    unit: str = "line"  # or "element"

    def value(self) -> dict[str, Any]:
        try:
            value = decode_exactly(self.data)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            self.check()  # which says why
            raise self.error("not a JSON object")
        if self._may_be_deep() and _depth(value) > _DEEPEST:
            raise self.error(f"is nested more than {_DEEPEST} levels deep; leave it out or flatten it")
        return value

    def check(self) -> None:
        """Raises unless it is a JSON object."""
        decode_line(self.path, Line(self.data, self.number, 0, 0))

    def fields(self) -> dict[str, Any]:
        """The value of each field as it is written, to be written again by orjson: every digit stays."""
        if self._may_be_deep():
            self.value()
        try:
            fields = msgspec.json.decode(self.data, type=dict[str, msgspec.Raw])
        except msgspec.DecodeError:  # a bare NaN, or what is no row
            return dict(self.value())
        return {name: orjson.Fragment(bytes(raw)) for name, raw in fields.items()}

    def error(self, why: str) -> BadLineError:
        return BadLineError(self.path, self.number, why, self.unit)

    def _may_be_deep(self) -> bool:
        return self.data.count(b"{") + self.data.count(b"[") > _DEEPEST


def encode_row(value: Any) -> bytes:
    """A row as JSON, whole numbers of any size as they are."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return encode_exactly(value)


def sorted_json(value: Any) -> bytes:
    """The same bytes for equal values, whatever the order of their keys."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        return msgspec.json.encode(value, order="deterministic")


def duckdb_pattern(path: Path) -> str:
    """DuckDB takes every path for a pattern: `run[1]` would be read as `run1`."""
    return "".join(f"[{char}]" if char in "*?[" else char for char in str(path))


def parquet_source(path: Path) -> str:
    """A FROM clause for a Parquet file: `to_json(_row)` is a row of it.

    Maps become objects; what is of type JSON, since it fits no other type, is read back as what it was.
    """
    name = duckdb_pattern(path).replace("'", "''")
    return f"read_parquet('{name}', binary_as_string = true) AS _row"


def _depth(value: dict[str, Any]) -> int:
    depth = 0
    level: list[dict[str, Any] | list[Any]] = [value]
    while level:
        depth += 1
        inside = [item for one in level for item in (one.values() if isinstance(one, dict) else one)]
        level = [item for item in inside if isinstance(item, dict | list)]
    return depth


class RowCount:
    """What a reader found: rows, and the blank lines it skipped."""

    def __init__(self, rows: int = 0, blank: int = 0) -> None:
        self.rows = rows
        self.blank = blank


def read_rows(
    path: Path,
    *,
    end: int | None = None,
    on_read: OnRead = lambda _: None,
    digest: Digest | None = None,
    count: RowCount | None = None,
) -> Iterator[Row]:
    """The rows of a file, up to the byte `end` of it; `digest` is updated with every byte that is read.

    Of a Parquet file all is read, and not from beginning to end, so it has no such end or digest.
    """
    count = count or RowCount()
    if path.suffix == ".parquet":
        lines = _parquet_rows(path, on_read)
    else:
        lines = enumerate(_lines(path, _Bounded(path, end, on_read, digest)), 1)
    for number, data in lines:
        if not data or data.isspace():
            count.blank += 1
            continue
        count.rows += 1
        yield Row(data, path, number)


class _Bounded(io.FileIO):
    """A file up to a certain byte, of which a digest is taken as it is read."""

    def __init__(self, path: Path, end: int | None, on_read: OnRead, digest: Digest | None) -> None:
        super().__init__(path)
        self._left = path.stat().st_size if end is None else end
        self._on_read, self._digest = on_read, digest

    def read(self, size: int | None = -1, /) -> bytes:
        wanted = self._left if size is None or size < 0 else min(size, self._left)
        data = super().read(wanted) if wanted else b""
        self._left -= len(data)
        if self._digest is not None:
            self._digest.update(data)
        self._on_read(len(data))
        return data


def check_is_whole(path: Path) -> None:
    """Raises where the end of a compressed file is missing."""
    for _ in _lines(path, _Bounded(path, None, lambda _: None, None)):
        pass


def _lines(path: Path, file: _Bounded) -> Iterator[bytes]:
    """Lines without their newlines; what follows the last newline is a line too."""
    number, parts = 0, []
    with file:
        try:
            stream: Any = file
            if path.suffix in COMPRESSED:
                import pyarrow as pa

                stream = pa.CompressedInputStream(pa.PythonFile(file, mode="r"), COMPRESSED[path.suffix])
            while chunk := stream.read(_CHUNK):
                first, *others = chunk.split(b"\n")
                parts.append(first)  # a long line is joined once
                if not others:
                    continue
                yield b"".join(parts)
                parts = [others.pop()]
                yield from others
                number += 1 + len(others)
        except (OSError, ValueError) as error:  # Arrow's errors are one or the other
            if path.suffix not in COMPRESSED:
                raise
            raise BadFileError(path, f"cannot be decompressed after line {number}: {error}") from error
    if rest := b"".join(parts):
        yield rest


def _parquet_rows(path: Path, on_read: OnRead) -> Iterator[tuple[int, bytes]]:
    import duckdb

    try:
        with duckdb.connect(config={"memory_limit": "1GB"}) as connection:
            connection.execute("SET enable_progress_bar = false")
            ((total,),) = connection.sql(f"SELECT count(*) FROM {parquet_source(path)}").fetchall()
            share = path.stat().st_size / max(1, total)
            rows = connection.sql(f"SELECT to_json(_row)::VARCHAR FROM {parquet_source(path)}")
            number = 0
            for batch in rows.to_arrow_reader(_PARQUET_BATCH):
                for text in batch.column(0).to_pylist():
                    number += 1
                    yield number, _without_nan(text).encode()
                on_read(int(batch.num_rows * share))
    except duckdb.Error as error:
        raise BadFileError(path, f"not a readable Parquet file: {error}") from error


def _without_nan(text: str) -> str:
    if "NaN" not in text and "Infinity" not in text:
        return text
    return orjson.dumps(json.loads(text)).decode()
