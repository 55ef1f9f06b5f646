"""Token exports as Parquet and as Arrow streams, a batch at a time.

A stream that is being written may end anywhere. Without an `end` the whole batches before that place are
read; an `end` says how much of it must be there.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from rollbook.errors import BadFileError, BadLineError
from rollbook.records.token_columns import ALL_COLUMNS
from rollbook.records.token_files import STREAM
from rollbook.records.tokens import TEXT, Array, Keys, TokenSequence, array_of, check_version, made

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS = 16  # of a batch; sequences may be long
_KEYS = tuple(Keys.__struct_fields__)


class UpTo(io.RawIOBase):
    """A file as if it ended at a byte; `is_short` once more was asked for."""

    def __init__(self, path: Path, end: int | None) -> None:
        super().__init__()
        self._file = path.open("rb", buffering=0)
        size = path.stat().st_size
        self._left = size if end is None else min(size, end)
        self.is_short = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), self._left)
        read = self._file.readinto(memoryview(buffer)[:wanted]) or 0
        self.is_short |= read < len(buffer)
        self._left -= read
        return read

    def close(self) -> None:
        self._file.close()
        super().close()


def read_table(
    path: Path, end: int | None, iteration: int | None, wanted: frozenset[str]
) -> Iterator[TokenSequence]:
    number = 0
    is_stream = path.suffix == STREAM
    batches = stream_batches(path, end) if is_stream else _of_parquet(path, iteration, wanted)
    for batch in batches:
        yield from _sequences(batch, path, number, wanted)
        number += batch.num_rows


def stream_batches(path: Path, end: int | None) -> Iterator[pa.RecordBatch]:
    """The batches of a stream up to a byte."""
    import pyarrow as pa

    source = UpTo(path, end)
    with pa.PythonFile(source, mode="r") as file:
        try:
            yield from pa.ipc.open_stream(file)
        except (pa.ArrowException, OSError) as error:
            if end is not None or not source.is_short:
                raise BadFileError(path, f"not a readable Arrow stream: {error}") from error


def _of_parquet(path: Path, iteration: int | None, wanted: frozenset[str]) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            names = [name for name in file.schema_arrow.names if _is_wanted(name, wanted)]
            for group in range(file.num_row_groups):  # Arrow keeps what it has read of all that it is given
                if _may_hold(file.metadata.row_group(group), iteration):
                    yield from file.iter_batches(batch_size=_ROWS, row_groups=[group], columns=names)
    except (pa.ArrowException, OSError) as error:
        raise BadFileError(path, f"not a readable Parquet file: {error}") from error


def _is_wanted(name: str, wanted: frozenset[str]) -> bool:
    return name in wanted or (name in _KEYS and name != TEXT) or (name == "text_offsets" and TEXT in wanted)


def _may_hold(group: Any, iteration: int | None) -> bool:
    """Whether the statistics of a row group leave room for the iteration."""
    for index in range(group.num_columns) if iteration is not None else ():
        column = group.column(index)
        if column.path_in_schema == "iteration" and column.statistics and column.statistics.has_min_max:
            return bool(column.statistics.min <= iteration <= column.statistics.max)
    return True


def _sequences(
    batch: pa.RecordBatch, path: Path, before: int, wanted: frozenset[str]
) -> Iterator[TokenSequence]:
    names = {name for name in batch.schema.names if _is_wanted(name, wanted)}
    keys = batch.select([name for name in _KEYS if name in names]).to_pylist()
    lists = {name: _Lists(name, batch.column(name)) for name in ALL_COLUMNS if name in names}
    offsets = _Lists("text_offsets", batch.column("text_offsets")) if "text_offsets" in names else None
    for row in range(batch.num_rows):
        number = before + row + 1
        try:
            found = msgspec.convert(keys[row], Keys)
        except msgspec.ValidationError as error:
            raise BadLineError(path, number, f"not a token record: {error}") from None
        check_version(found.schema_version, path, number)
        columns = {name: values.of(row) for name, values in lists.items()}
        yield made(found, columns, offsets.of(row) if offsets else None, path, number, wanted)


class _Lists:
    """A column of lists as numpy, taken apart once per batch."""

    def __init__(self, name: str, column: pa.Array) -> None:
        import pyarrow as pa

        self._places: Array | None = None
        if pa.types.is_null(column.type):
            return
        self._values = array_of(name, column.values.to_numpy(zero_copy_only=False))
        self._places = np.asarray(column.offsets)
        self._is_null = np.asarray(column.is_null())

    def of(self, row: int) -> Array | None:
        if self._places is None or self._is_null[row]:
            return None
        return self._values[self._places[row] : self._places[row + 1]]
