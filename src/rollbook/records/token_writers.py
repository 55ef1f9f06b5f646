"""Writers of one process's records of a token export: JSON lines, or an Arrow stream that becomes Parquet.

They are given the records of a micro-batch as flat arrays and cut them. A JSON line has every column, so that
any tool reads it; Parquet has the independent ones, and readers derive the others (`token_columns.py`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import orjson

from rollbook.errors import WriteError
from rollbook.records.atomic import Writeback, fsync_directory, make_directory, replacing
from rollbook.records.jsonl import JsonlWriter
from rollbook.records.locks import FileLock
from rollbook.records.record import NONFINITE
from rollbook.records.token_columns import DERIVED, EXPORTED, derived
from rollbook.records.token_files import PARQUET, STREAM, ExportFiles
from rollbook.records.token_settings import TokenExportSettings

Array = np.ndarray[Any, Any]
# A row group of Parquet ends with the first of the two: its columns are in memory until it is written.
_ROWS_OF_A_GROUP, _BYTES_OF_A_GROUP = 512, 64 << 20

# Bytes of JSON lines that are put together for one write. More of them cost more: fresh memory is slow.
_WRITTEN_AT_ONCE = 1 << 16
_LENGTH_OF_A_RUN = 32  # tokens on average, from which on a JSON column is made of runs


class TokenRecords(NamedTuple):
    """The records of a micro-batch. `_F`: one value for each token of all records, one record after another.

    A float is NaN where the token was not trained. None stands for a column that does not apply.
    """

    heads: list[dict[str, Any]]  # the keys of each record before its text
    texts: list[str]
    bound_R: Array  # where each record begins in the flat arrays, and the end
    text_offset_F: Array
    token_F: Array
    trained_F: Array
    floats_F: Mapping[str, Array | None]
    masks_F: Mapping[str, Array | None]


class TokenWriter(Protocol):
    """Where the records of one process go."""

    @property
    def file(self) -> str | None:
        """The final name of the file that is being written; None before the first record."""
        ...

    @property
    def end(self) -> int:
        """Its length."""
        ...

    def write(self, records: TokenRecords, iteration: int) -> None: ...

    def sync(self) -> None:
        """Put everything on the disk."""
        ...

    def keep(self) -> None:
        """What was synced is in the manifest now."""
        ...

    def drop(self) -> None:
        """Cut off what came after the last `keep`, to free its space. Nothing more is written then."""
        ...

    def end_part(self) -> None:
        """A checkpoint comes now: whatever is written later may be dropped by a resume."""
        ...

    def close(self) -> None: ...


def open_token_writer(files: ExportFiles, settings: TokenExportSettings, rank: int) -> TokenWriter:
    return (JsonWriter if settings.format == "jsonl" else ParquetWriter)(files, settings, rank)


class JsonWriter:
    def __init__(self, files: ExportFiles, settings: TokenExportSettings, rank: int) -> None:
        self._settings = settings
        self._lines = JsonlWriter(files.lines_of(rank), check=False, is_large=True)
        self.file: str | None = self._lines.path.name
        self._kept = self._lines.position

    @property
    def end(self) -> int:
        return self._lines.position

    def write(self, records: TokenRecords, iteration: int) -> None:
        columns = self._columns(records)
        nonfinite = _nonfinite(columns, records.trained_F)
        bounds = records.bound_R.tolist()
        rows = zip(*(_rows_of(flat, bounds) for flat in columns.values()), strict=True)
        lines: list[bytes] = []
        size = 0
        for number, (head, text, row) in enumerate(zip(records.heads, records.texts, rows, strict=True)):
            line = head | {"text": text} | dict(zip(columns, row, strict=True))
            if nonfinite and (found := _within(nonfinite, bounds[number], bounds[number + 1])):
                line[NONFINITE] = found
            lines.append(orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY))
            size += len(lines[-1])
            if size >= _WRITTEN_AT_ONCE:
                self._lines.append_all(lines)
                lines, size = [], 0
        self._lines.append_all(lines)

    def _columns(self, records: TokenRecords) -> dict[str, Array | None]:
        """Every column of the lines, in their order."""
        given: dict[str, Array | None] = {"token_ids": records.token_F, "loss_mask": records.trained_F}
        given |= dict(records.floats_F) | dict(records.masks_F)
        exports = self._settings.exports
        if exports("position_ids"):
            lengths_R = np.diff(records.bound_R)
            starts_F = np.repeat(records.bound_R[:-1], lengths_R)
            given["position_ids"] = (np.arange(len(starts_F)) - starts_F).astype(np.int32)
        if any(map(exports, DERIVED)):
            given |= derived(given.get("inference_logprobs"), given.get("trainer_logprobs"))
        found = {name: given[name] for name in EXPORTED if name in given and exports(name)}
        return {"text_offsets": records.text_offset_F} | found

    def sync(self) -> None:
        self._lines.sync()

    def keep(self) -> None:
        self._kept = self._lines.position

    def drop(self) -> None:
        self._lines.cut(self._kept)

    def end_part(self) -> None:
        """The lines of all parts are in one file; the manifest knows where each iteration ends."""

    def close(self) -> None:
        self._lines.close()


def _rows_of(flat_F: Array | None, bounds: list[int]) -> list[Any]:
    """A column cut into rows, for orjson. One that repeats itself (a reward, an advantage) is made of runs of
    the same value, for a number costs more to write than to copy."""
    if flat_F is None:
        return [None] * (len(bounds) - 1)
    if flat_F.dtype == np.float32:
        bits_F = flat_F.view(np.int32)
        begin_S = np.flatnonzero(bits_F[1:] != bits_F[:-1]) + 1
        if len(begin_S) * _LENGTH_OF_A_RUN < len(flat_F):
            return _rows_of_runs(flat_F, sorted({*begin_S.tolist(), *bounds}), bounds)
    return [flat_F[start:end] for start, end in pairwise(bounds)]


def _rows_of_runs(flat_F: Array, edges: list[int], bounds: list[int]) -> list[orjson.Fragment]:
    """The rows as JSON; every value between two edges is the same."""
    runs: list[bytes] = []
    rows = []
    row = 1
    for (start, end), value in zip(pairwise(edges), flat_F[edges[:-1]], strict=True):
        runs.append((orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY) + b",") * (end - start))
        if end == bounds[row]:
            rows.append(orjson.Fragment(b"[" + b"".join(runs)[:-1] + b"]"))
            row += 1
            runs = []
    return rows


def _nonfinite(columns: Mapping[str, Array | None], trained_F: Array) -> dict[str, Array]:
    """The places of trained tokens whose value is not finite, by column."""
    found = {}
    trained = np.count_nonzero(trained_F)
    for name, flat in columns.items():
        if flat is not None and flat.dtype.kind == "f":
            finite_F = np.isfinite(flat) & trained_F
            if np.count_nonzero(finite_F) < trained:
                place_K = np.flatnonzero(trained_F & ~finite_F)
                found[name] = np.stack([place_K, flat[place_K].astype(np.float64)], axis=1)
    return found


def _within(nonfinite: Mapping[str, Array], start: int, end: int) -> dict[str, list[list[Any]]]:
    """The non-finite values of one record, as [[offset, "nan" | "inf" | "-inf"], ...]."""
    found = {}
    for name, pair_K2 in nonfinite.items():
        own_K2 = pair_K2[(pair_K2[:, 0] >= start) & (pair_K2[:, 0] < end)]
        if len(own_K2):
            found[name] = [[int(place) - start, str(float(value))] for place, value in own_K2]
    return found


class ParquetWriter:
    """Parts that end at checkpoints; the open one is an Arrow stream, so that a kill loses none of it."""

    def __init__(self, files: ExportFiles, settings: TokenExportSettings, rank: int) -> None:
        self._files, self._settings, self._rank = files, settings, rank
        self._stream: Any = None
        self._sink: Any = None
        self._writeback: Any = None  # of the stream
        self._part: Path | None = None  # the final name of the open part
        self._end = self._kept = 0  # of its stream: what is synced, and what the manifest has
        make_directory(files.directory)
        self._lock = FileLock(files.part_of(rank, 0).with_name(f"{files.prefix}rank_{rank}{PARQUET}"))
        for owner, first, path in files.data_files():  # left open by a killed writer
            if owner == rank and first is not None and path.suffix == STREAM:
                to_parquet(path)

    @property
    def file(self) -> str | None:
        return None if self._part is None else self._part.name

    @property
    def end(self) -> int:
        return self._end

    def write(self, records: TokenRecords, iteration: int) -> None:
        import pyarrow as pa

        batch = record_batch(records, self._settings)
        try:
            if self._stream is None:
                self._part = self._files.part_of(self._rank, iteration)
                self._sink = self._part.with_suffix(STREAM).open("wb")
                fsync_directory(self._files.directory)
                self._writeback = Writeback(self._sink.fileno())
                self._stream = pa.ipc.new_stream(self._sink, batch.schema)
            self._stream.write_batch(batch)
            self._writeback.up_to(self._sink.tell())
        except OSError as error:
            raise WriteError(f"{self._part}: not written: {error.strerror or error}") from error

    def sync(self) -> None:
        if self._sink is not None:
            self._end = _synced(self._sink)

    def keep(self) -> None:
        self._kept = self._end

    def drop(self) -> None:
        if self._part is None:
            return
        path, kept = self._part.with_suffix(STREAM), self._kept
        with contextlib.suppress(OSError):  # of what is still in its buffer
            if self._sink is not None:
                self._sink.close()
        self._stream = self._sink = self._part = None
        self._end = self._kept = 0
        try:
            if kept:
                os.truncate(path, kept)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise WriteError(f"{path}: cannot be cut: {error.strerror or error}") from error

    def end_part(self) -> None:
        if self._part is None:
            return
        path = self._part.with_suffix(STREAM)
        try:
            self._stream.close()
            self._sink.close()
            os.truncate(path, self._end)  # what came after the last `sync` belongs to no whole iteration
        except OSError as error:
            raise WriteError(f"{path}: not written: {error.strerror or error}") from error
        finally:
            self._stream = self._sink = self._part = None
        if self._end:
            to_parquet(path)
        else:
            path.unlink()
        self._end = self._kept = 0

    def close(self) -> None:
        try:
            self.end_part()
        finally:
            self._lock.release()


def _synced(sink: Any) -> int:
    try:
        sink.flush()
        os.fsync(sink.fileno())
        return int(sink.tell())
    except OSError as error:
        raise WriteError(f"{sink.name}: not written: {error.strerror or error}") from error


def to_parquet(stream: Path) -> Path:
    """The Parquet file of a part, in the place of its Arrow stream."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    final = stream.with_suffix(PARQUET)
    with pa.memory_map(str(stream)) as source, pa.ipc.open_stream(source) as reader:
        plain = [name for name in reader.schema.names if name in ("token_ids", "text_offsets")]
        with (
            replacing(final, is_locked=True) as file,
            pq.ParquetWriter(
                file,
                reader.schema,
                compression="zstd",
                compression_level=1,
                use_dictionary=[n for n in reader.schema.names if n not in (*_FLOATS, *plain)],
                column_encoding={
                    f"{name}.list.element": "DELTA_BINARY_PACKED" if name in plain else "BYTE_STREAM_SPLIT"
                    for name in reader.schema.names
                    if name in (*_FLOATS, *plain)
                },
                write_statistics=["iteration"],  # lets a reader skip groups
            ) as writer,
        ):
            waiting: list[Any] = []
            for batch in reader:
                waiting.append(batch)
                rows, size = sum(map(len, waiting)), sum(some.nbytes for some in waiting)
                if rows >= _ROWS_OF_A_GROUP or size >= _BYTES_OF_A_GROUP:
                    writer.write_table(pa.Table.from_batches(waiting))
                    waiting = []
            if waiting:
                writer.write_table(pa.Table.from_batches(waiting))
    stream.unlink()
    return final


_FLOATS = ("inference_logprobs", "trainer_logprobs", "entropy", "importance_ratio", "reference_logprobs")


def record_batch(records: TokenRecords, settings: TokenExportSettings) -> Any:
    """The independent columns of the records, as Arrow has them."""
    import pyarrow as pa

    bound_R = pa.array(records.bound_R.astype(np.int32))
    columns: dict[str, Any] = _heads(records.heads)
    columns["text"] = pa.array(records.texts, pa.string())

    def lists(values: Any) -> Any:
        return pa.ListArray.from_arrays(bound_R, values)

    columns["text_offsets"] = lists(pa.array(records.text_offset_F, pa.int32()))
    columns["token_ids"] = lists(pa.array(records.token_F, pa.int32()))
    columns["loss_mask"] = lists(pa.array(records.trained_F, pa.bool_()))
    untrained_F = ~records.trained_F
    for name, flat in records.floats_F.items():
        if settings.exports(name):
            columns[name] = (
                pa.nulls(len(records.heads), pa.list_(pa.float32()))
                if flat is None
                else lists(pa.array(flat, pa.float32(), mask=untrained_F))
            )
    for name, flat in records.masks_F.items():
        if settings.exports(name):
            columns[name] = (
                pa.nulls(len(records.heads), pa.list_(pa.bool_()))
                if flat is None
                else lists(pa.array(flat, pa.bool_()))
            )
    return pa.record_batch(columns)


def _heads(heads: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    import pyarrow as pa

    turn = pa.struct(
        [
            ("step_idx", pa.int32()),
            ("start", pa.int32()),
            ("end", pa.int32()),
            ("policy_version", pa.int64()),
            ("temperature", pa.float32()),
        ]
    )
    texts = ("run_id", "split", "data_file", "task_id", "env_name")
    columns = {}
    for name in heads[0] if heads else ():
        kind = pa.list_(turn) if name == "turns" else pa.string() if name in texts else pa.int64()
        columns[name] = pa.array([head[name] for head in heads], kind)
    return columns
