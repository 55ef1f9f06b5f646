"""Writes the rows of a new dataset in the format its ending names.

Parquet is made from the finished lines by DuckDB, which reads all of them before it settles on the columns: a
field that turns up in the last row is a column like any other, and null in the rows without it. Objects whose
keys are data (tools and the arguments of their calls, whatever has hundreds of keys, or none) are of
Parquet's type JSON: nulls for the keys of other rows would garble them.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

from rollbook.errors import UsageError, WriteError
from rollbook.records.complete import FileFacts, complete_files, file_facts
from rollbook.records.datasets import ENDINGS
from rollbook.records.rows import COMPRESSED

_BUFFER = 1 << 20
_OPEN = frozenset({"arguments", "parameters", "tools"})  # what holds objects whose keys are data
_ROW_GROUP = 2048  # rows that Parquet's writer holds at once
_MEMORY = "1GB"
_LARGEST_ROW, _LARGEST_EVER = 16 << 20, 1 << 30


def refuse_existing(path: Path, *, overwrite: bool) -> None:
    if not path.name.endswith(ENDINGS):
        raise UsageError(f"{path}: an output ends in {', '.join(ENDINGS)}")
    if path.exists() and not overwrite:
        raise UsageError(f"{path} exists; choose another name or add --overwrite")


@contextlib.contextmanager
def new_dataset(path: Path, *, overwrite: bool = False) -> Iterator[RowOutput]:
    """A dataset without a manifest, complete or absent."""
    refuse_existing(path, overwrite=overwrite)
    with complete_files(path, overwrite=overwrite) as (aside,), RowOutput(path, aside) as output:
        yield output
        output.finish()


class RowOutput:
    """The one writer of a dataset, complete once it is finished."""

    def __init__(self, path: Path, directory: Path) -> None:
        """`path` is the name that it will have; it is written into the directory."""
        self.path = path
        self.rows = 0
        self._final = directory / path.name
        self._lines = directory / "lines" if path.suffix == ".parquet" else self._final
        try:
            self._raw = _HashedFile(self._lines)
            self._file: Any = io.BufferedWriter(self._raw, _BUFFER)
            if path.suffix in COMPRESSED:
                import pyarrow as pa

                plain = pa.PythonFile(self._file, mode="w")
                self._file = pa.CompressedOutputStream(plain, COMPRESSED[path.suffix])
        except OSError as error:
            raise self._error(error) from error

    def write(self, data: bytes) -> None:
        """One row: a JSON object without a newline in it."""
        self.write_lines(data + b"\n")
        self.rows += 1

    def write_lines(self, lines: bytes) -> None:
        """Whole lines, for who counts the `rows` in them."""
        try:
            self._file.write(lines)
        except OSError as error:
            raise self._error(error) from error

    def finish(self) -> FileFacts:
        """Writes what is left; returns the size and digest of the file."""
        try:
            self._file.close()
            if self._lines == self._final:
                return FileFacts(self._final.stat().st_size, self._raw.digest.hexdigest())
            _write_parquet(self._lines, self._final, self.path)
            self._lines.unlink()
            return file_facts(self._final)
        except OSError as error:
            raise self._error(error) from error

    def __enter__(self) -> RowOutput:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._file.close()

    def _error(self, error: OSError) -> WriteError:
        return WriteError(f"{self.path}: not written ({error.strerror or error})")


class _HashedFile(io.FileIO):
    """A new file, with the digest of what is written to it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "x")
        self.digest = xxhash.xxh3_128()

    def write(self, data: Any, /) -> int:
        written = super().write(data)
        self.digest.update(memoryview(data)[:written])
        return written


def _write_parquet(lines: Path, target: Path, shown: Path) -> None:
    import duckdb

    size = _LARGEST_ROW
    while True:
        with duckdb.connect(
            config={"memory_limit": _MEMORY, "temp_directory": f"{target}.spill"}
        ) as connection:
            connection.execute("set enable_progress_bar = false")  # it would stand in our own output
            try:
                rows = _as_columns(connection, lines, size)
                rows.write_parquet(str(target), compression="zstd", row_group_size=_ROW_GROUP)
                return
            except duckdb.Error as error:
                if "maximum_object_size" not in str(error) or size >= _LARGEST_EVER:
                    raise WriteError(
                        f"{shown}: these rows do not fit into Parquet ({error}); use .jsonl.zst"
                    ) from error
        size *= 4


def _as_columns(connection: Any, lines: Path, size: int) -> Any:
    how: dict[str, Any] = {"format": "newline_delimited", "maximum_object_size": size}
    rows = connection.read_json(str(lines), sample_size=-1, **how)
    if rows.columns == ["json"]:  # so many fields that it took the row itself for a map
        how["map_inference_threshold"] = -1
        rows = connection.read_json(str(lines), sample_size=-1, **how)
    kinds = [_as_written(kind, name) for name, kind in zip(rows.columns, rows.types, strict=True)]
    if kinds == rows.types:
        return rows
    columns = dict(zip(rows.columns, map(str, kinds), strict=True))
    return connection.read_json(str(lines), columns=columns, **how)


def _as_written(kind: Any, name: str = "") -> Any:
    """JSON has no dates, times and UUIDs: text that looks like one is text, and stays as it was written."""
    import duckdb

    if kind.id.startswith(("date", "time", "uuid", "interval")):
        return duckdb.sqltype("VARCHAR")
    if kind.id == "map" or (name in _OPEN and kind.id in ("struct", "list")):
        return duckdb.sqltype("JSON")
    if kind.id == "list":
        return duckdb.list_type(_as_written(kind.children[0][1]))
    if kind.id == "struct":
        return duckdb.struct_type({inner: _as_written(child, inner) for inner, child in kind.children})
    return kind
