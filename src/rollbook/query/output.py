"""The rows of an answer as CSV, JSON, JSON lines or Parquet, a batch at a time.

Columns of JSON are JSON in JSON, to the digit; in CSV they are its text, and so are lists and structs. A file
and its manifest appear together, or not at all.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, TextIO

import orjson

from rollbook.errors import RollbookError, UsageError, WriteError
from rollbook.query.session import Answer, Session
from rollbook.records.complete import complete_files, file_facts
from rollbook.records.datasets import DataManifest, InputRecord, manifest_path, refuse_foreign_manifest
from rollbook.records.printable import csv_cell, printable_json


class Format(StrEnum):
    TABLE = "table"
    CSV = "csv"
    JSON = "json"
    JSONL = "jsonl"
    PARQUET = "parquet"


def format_of(path: Path) -> Format:
    ending = path.suffix.removeprefix(".").lower()
    if ending not in list(Format) or ending == Format.TABLE:
        endings = ", ".join(f".{kind}" for kind in Format if kind is not Format.TABLE)
        raise UsageError(f"{path}: the ending says nothing about the format; use {endings} or add --format")
    return Format(ending)


def write_file(session: Session, sql: str, path: Path, kind: Format, *, overwrite: bool) -> int:
    """Returns how many rows there were."""
    if path.exists() and not overwrite:
        raise UsageError(f"{path} exists; choose another name or add --overwrite")
    if any(file.path.resolve() == path.resolve() for file in session.sources.files):
        raise UsageError(f"{path} is one of the files the query reads; choose another name")
    refuse_foreign_manifest(path)
    with complete_files(path, overwrite=overwrite) as (aside,):
        try:
            count = _write(session, sql, made := aside / path.name, kind)
            manifest = _manifest(session, sql, path, made, count)
            (aside / manifest_path(path).name).write_bytes(manifest.encoded())
        except OSError as error:
            raise WriteError(f"{path}: not written ({error.strerror or error})") from error
    return count


def _manifest(session: Session, sql: str, path: Path, made: Path, rows: int) -> DataManifest:
    """What the rows were made from: every file that the query could read, as it is at its end."""
    inputs = [(file.path, file_facts(file.path)) for file in session.files(sql)]
    facts = file_facts(made)
    return DataManifest(
        command="query",
        directory=str(Path.cwd()),
        inputs=[InputRecord(path=str(read), bytes=was.bytes, xxh3_128=was.xxh3_128) for read, was in inputs],
        left_out={str(path): why for path, why in session.sources.skipped},
        arguments={"sql": sql},
        output=str(path),
        output_bytes=facts.bytes,
        output_xxh3_128=facts.xxh3_128,
        rows_out=rows,
    )


def _write(session: Session, sql: str, path: Path, kind: Format) -> int:
    if kind is Format.PARQUET:
        return _write_parquet(session, sql, path)
    with path.open("w", encoding="utf-8", newline="") as stream:
        return write_text(session.run(sql), stream, kind)


def write_text(answer: Answer, stream: TextIO | EscapedJson, kind: Format) -> int:
    writer = {Format.CSV: _write_csv, Format.JSON: _write_json, Format.JSONL: _write_lines}[kind]
    return writer(answer, stream)


def _write_csv(answer: Answer, stream: TextIO | EscapedJson) -> int:
    plain = csv.writer(stream, lineterminator="\n")
    quoted = csv.writer(stream, lineterminator="\n", quoting=csv.QUOTE_ALL)

    def write(row: Iterable[Any]) -> None:
        cells = [_as_text(value) for value in row]
        # The module leaves these as they are, and whoever reads ends the line there.
        has_returns = any(isinstance(cell, str) and "\r" in cell for cell in cells)
        (quoted if has_returns else plain).writerow(cells)

    write(answer.columns)
    count = 0
    for batch in answer.batches:
        for row in batch:
            write(row)
        count += len(batch)
    return count


def _write_lines(answer: Answer, stream: TextIO | EscapedJson) -> int:
    count = 0
    for line in _json_rows(answer):
        stream.write(line + "\n")
        count += 1
    return count


def _write_json(answer: Answer, stream: TextIO | EscapedJson) -> int:
    count = 0
    for line in _json_rows(answer):
        stream.write(("[\n" if count == 0 else ",\n") + line)
        count += 1
    stream.write("\n]\n" if count else "[]\n")
    return count


def _json_rows(answer: Answer) -> Iterator[str]:
    names = distinct(answer.columns)
    is_json = [kind == "JSON" for kind in answer.types]
    for batch in answer.batches:
        for row in batch:
            values = (_as_json(value) if json else value for value, json in zip(row, is_json, strict=True))
            yield _dumped(dict(zip(names, values, strict=True)))


def _write_parquet(session: Session, sql: str, path: Path) -> int:
    import pyarrow
    import pyarrow.parquet

    count = 0
    with session.arrow(sql) as (schema, batches):
        names = distinct(schema.names)
        schema = pyarrow.schema([field.with_name(name) for field, name in zip(schema, names, strict=True)])
        try:
            with pyarrow.parquet.ParquetWriter(path, schema, compression="zstd") as writer:
                for batch in batches:
                    writer.write_batch(pyarrow.RecordBatch.from_arrays(batch.columns, schema=schema))
                    count += batch.num_rows
        except pyarrow.ArrowException as error:
            raise RollbookError(f"Parquet does not take this result ({error}); try .csv or .jsonl") from error
    return count


def distinct(names: list[str]) -> list[str]:
    """`run, run` as `run, run_1`: an object has a key once."""
    taken: dict[str, None] = {}
    for name in names:
        free, number = name, 0
        while free in taken:
            number += 1
            free = f"{name}_{number}"
        taken[free] = None
    return list(taken)


def _as_json(value: Any) -> Any:
    """A value of type JSON as it is written, on one line; a bare NaN of another writer as text."""
    if value is None:
        return None
    if "NaN" in value or "Infinity" in value:
        try:
            orjson.loads(value)
        except orjson.JSONDecodeError:
            return value
    return orjson.Fragment(value.replace("\n", " "))


def _as_text(value: Any) -> Any:
    return csv_cell(_dumped(value) if isinstance(value, list | dict | tuple) else value)


class EscapedJson:
    """A stream of JSON to whoever reads: what a terminal would act on is escaped, which changes no value."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(printable_json(text))


def _dumped(value: Any) -> str:
    options = orjson.OPT_NON_STR_KEYS | orjson.OPT_NAIVE_UTC
    try:
        return orjson.dumps(value, default=_plain, option=options).decode()
    except orjson.JSONEncodeError:  # an integer of more than 64 bits, which JSON has and orjson does not
        return orjson.dumps(_with_digits(value), default=_plain, option=options).decode()


def _with_digits(value: Any) -> Any:
    """Large integers as they are to be written."""
    if isinstance(value, dict):
        return {_as_key(key): _with_digits(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_with_digits(inner) for inner in value]
    return orjson.Fragment(str(value)) if _is_large(value) else value


def _as_key(key: Any) -> Any:
    return str(key) if _is_large(key) else key


def _is_large(value: Any) -> bool:
    return isinstance(value, int) and not -(2**63) <= value < 2**64


def _plain(value: Any) -> Any:
    """DECIMAL, BLOB, INTERVAL: whatever JSON has no word for."""
    return value.hex() if isinstance(value, bytes) else str(value)
