"""Rows one at a time from JSON lines, compressed lines and Parquet, each with the place it stands at.

Nothing holds a file. Bytes stay bytes until somebody asks for the value, so commands that only choose rows
copy them untouched. Blank lines are skipped and counted; anything else that is no JSON object is an error
that names file and line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from rollbook.errors import BadFileError, BadLineError
from rollbook.records.jsonl import Line, read_lines
from rollbook.records.record import decode_line

if TYPE_CHECKING:
    import pyarrow as pa

COMPRESSED = {".zst": "zstd", ".gz": "gzip"}
_CHUNK = 1 << 20
_PARQUET_BATCH = 1024
_DEEPEST = 250  # what every writer of JSON here can write again

Advance = Callable[[int], None]  # told how many bytes of input were read since the last call


class Row(NamedTuple):
    """One JSON object as it stands in its file."""

    data: bytes
    path: Path
    number: int  # of the line, or of the row of a Parquet file, from 1

    def value(self) -> dict[str, Any]:
        value = decode_line(self.path, Line(self.data, self.number, 0, 0))
        if self.data.count(b"{") + self.data.count(b"[") > _DEEPEST and _depth(value) > _DEEPEST:
            raise self.refuse(f"is nested more than {_DEEPEST} levels deep; leave it out or flatten it")
        return value

    def refuse(self, why: str) -> BadLineError:
        return BadLineError(self.path, self.number, why)


def _depth(value: dict[str, Any]) -> int:
    depth = 0
    level: list[dict[str, Any] | list[Any]] = [value]
    while level:
        depth += 1
        held = [item for one in level for item in (one.values() if isinstance(one, dict) else one)]
        level = [item for item in held if isinstance(item, dict | list)]
    return depth


class RowCount:
    """What a reader saw: rows, and the blank lines it skipped."""

    def __init__(self) -> None:
        self.rows = 0
        self.blank = 0


def read_rows(path: Path, advance: Advance = lambda _: None, seen: RowCount | None = None) -> Iterator[Row]:
    seen = seen or RowCount()
    lines = _parquet_rows(path, advance) if path.suffix == ".parquet" else _text_lines(path, advance)
    for number, data in lines:
        if not data or data.isspace():
            seen.blank += 1
            continue
        seen.rows += 1
        yield Row(data, path, number)


def _text_lines(path: Path, advance: Advance) -> Iterator[tuple[int, bytes]]:
    if path.suffix in COMPRESSED:
        yield from _compressed_lines(path, advance)
        return
    last = 0
    for line in read_lines(path, accept_tail=True):
        if line.start - last >= _CHUNK:
            advance(line.start - last)
            last = line.start
        yield line.number, line.data
    advance(path.stat().st_size - last)


def _compressed_lines(path: Path, advance: Advance) -> Iterator[tuple[int, bytes]]:
    import pyarrow as pa

    number, rest = 0, b""
    with path.open("rb") as raw:
        read, last = 0, 0
        try:
            with pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), COMPRESSED[path.suffix]) as stream:
                while chunk := stream.read(_CHUNK):
                    pieces = (rest + chunk).split(b"\n")
                    rest = pieces.pop()
                    for data in pieces:
                        number += 1
                        yield number, data
                    read = raw.tell()
                    advance(read - last)
                    last = read
        except (OSError, pa.ArrowException) as error:
            raise BadFileError(path, f"cannot be decompressed after line {number}: {error}") from error
    if rest:
        yield number + 1, rest


def _parquet_rows(path: Path, advance: Advance) -> Iterator[tuple[int, bytes]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            share = path.stat().st_size / max(1, file.metadata.num_rows)
            number = 0
            for batch in file.iter_batches(batch_size=_PARQUET_BATCH):
                for row in _as_rows(batch):
                    number += 1
                    yield number, orjson.dumps(row, default=_as_text)
                advance(int(batch.num_rows * share))
    except pa.ArrowException as error:
        raise BadFileError(path, f"not a readable Parquet file: {error}") from error


def _as_text(value: Any) -> str:
    """Of what JSON has no word for, such as decimals and bytes."""
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)


def _as_rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """Maps are objects; what is of type JSON did not fit one Arrow type, and is read back as what it was."""
    parsers = {field.name: parse for field in batch.schema if (parse := _parser(field)) is not None}
    for row in batch.to_pylist():
        for name, parse in parsers.items():
            row[name] = parse(row[name])
        yield row


def _parser(field: pa.Field) -> Callable[[Any], Any] | None:
    """What turns the JSON in a value of this type into what it says; None where there is none in it."""
    import pyarrow as pa

    kind = field.type
    if str(kind).startswith("extension<arrow.json") or (field.metadata or {}).get(b"json"):
        return lambda value: None if value is None else orjson.loads(value)
    if pa.types.is_map(kind):
        to = _parser(kind.item_field) or (lambda value: value)
        return lambda pairs: None if pairs is None else {str(key): to(value) for key, value in pairs}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        inner = _parser(kind.value_field)
        if inner is not None:
            return lambda items: None if items is None else [inner(item) for item in items]
    if pa.types.is_struct(kind):
        parsers = {child.name: parse for child in kind if (parse := _parser(child)) is not None}
        if parsers:
            return lambda value: value and value | {name: to(value[name]) for name, to in parsers.items()}
    return None
