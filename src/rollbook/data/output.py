"""A dataset appears whole or not at all, in the format its ending names, and never over another one.

Rows are written aside and renamed at the end; a kill or an error leaves nothing under the name. Parquet is
made from the finished lines by DuckDB, which reads all of them before it settles on the columns: a field that
turns up in the last row is a column like any other, and null in the rows without it. Objects whose keys are
data (tools and the arguments of their calls, whatever has hundreds of keys, or none) are of Parquet's type
JSON: nulls for the keys of other rows would garble them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from rollbook.errors import UsageError, WriteError
from rollbook.records.atomic import fsync_directory, make_directory
from rollbook.records.datasets import ENDINGS
from rollbook.records.rows import COMPRESSED

# Not a multiple of a page: a large buffer begins 16 bytes into one, and from there to the beginning of a page
# of the file some processors (AMD's EPYC, measured) copy at a fifth of their speed.
_BUFFER = (1 << 20) + 32
_OPEN = frozenset({"arguments", "parameters", "tools"})  # what holds objects whose keys are data


def refuse_existing(path: Path, *, overwrite: bool) -> None:
    if not path.name.endswith(ENDINGS):
        raise UsageError(f"{path}: an output ends in {', '.join(ENDINGS)}")
    if path.exists() and not overwrite:
        raise UsageError(f"{path} exists; choose another name or add --overwrite")


class RowOutput:
    """The one writer of a new dataset; use it as a context manager."""

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        refuse_existing(path, overwrite=overwrite)
        self.path = path
        self.rows = 0
        self._overwrite = overwrite
        self._is_prepared = False
        self._aside = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
        compress = _compressor(path)  # whose import takes a moment, in which a Ctrl-C must find nothing yet
        try:
            make_directory(path.parent)
            self._file: IO[bytes] = self._aside.open("xb", buffering=_BUFFER)
        except OSError as error:
            raise WriteError(f"{path}: cannot write here: {error.strerror or error}") from error
        self._stream: Any = compress(self._file)

    def write(self, data: bytes) -> None:
        """One row: a JSON object without a newline in it."""
        try:
            self._stream.write(data + b"\n")
        except OSError as error:
            raise self._refused(error) from error
        self.rows += 1

    def write_block(self, block: bytes | memoryview, rows: int) -> None:
        """Many whole lines at once, for commands that copy what they have checked."""
        try:
            if self._stream is self._file:
                self._file.flush()
                left = memoryview(block)
                while left:  # past the buffer, which would copy it once more
                    left = left[os.write(self._file.fileno(), left) :]
            else:
                self._stream.write(block)
        except OSError as error:
            raise self._refused(error) from error
        self.rows += rows

    def push_to_disk(self, offset: int, length: int) -> None:
        """Have the disk begin with what was just written there, to spare the end; nothing waits for it.

        On Linux this advice does that first; what is on its way stays in the page cache.
        """
        if sys.platform == "linux":
            os.posix_fadvise(self._file.fileno(), offset, length, os.POSIX_FADV_DONTNEED)

    def __enter__(self) -> RowOutput:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            with contextlib.suppress(OSError, ValueError):
                self._stream.close()  # first: Arrow complains aloud of a file that is closed under it
            with contextlib.suppress(OSError, ValueError):
                self._file.close()
            with contextlib.suppress(OSError):
                self._aside.unlink(missing_ok=True)

    def prepare(self) -> None:
        """All that can fail, before the name is given: several outputs are prepared, then all are named."""
        if self._is_prepared:
            return
        try:
            if self._stream is not self._file:
                self._stream.close()  # writes the end of the compressed frame
            if not self._file.closed:
                self._file.flush()
                os.fsync(self._file.fileno())
            if self.path.suffix == ".parquet":
                self._file.close()
                self._make_parquet()
        except OSError as error:
            raise self._refused(error) from error
        self._is_prepared = True

    def _finish(self) -> None:
        self.prepare()
        try:
            if self._overwrite:
                self._aside.replace(self.path)
            else:
                self._take_name()
        except OSError as error:
            raise self._refused(error) from error
        fsync_directory(self.path.parent)

    def _take_name(self) -> None:
        """Unless somebody else has made a file of this name since this one was begun."""
        try:
            os.link(self._aside, self.path)
        except FileExistsError:
            raise UsageError(
                f"{self.path} was made by another command meanwhile, and this one's rows are dropped; "
                "choose another name or add --overwrite"
            ) from None
        except OSError:  # a disk without links
            refuse_existing(self.path, overwrite=False)
            self._aside.replace(self.path)

    def _make_parquet(self) -> None:
        import duckdb

        columns = self._aside.with_name(f"{self._aside.name}.parquet")
        try:
            with duckdb.connect() as connection:
                connection.execute("set preserve_insertion_order = true")
                connection.execute("set enable_progress_bar = false")  # it would stand in our own output
                how: Any = {"format": "newline_delimited", "maximum_object_size": 1 << 30}
                lines = connection.read_json(str(self._aside), sample_size=-1, **how)
                if lines.columns == ["json"]:  # so many fields that it took the row itself for a map
                    how["map_inference_threshold"] = -1
                    lines = connection.read_json(str(self._aside), sample_size=-1, **how)
                kinds = [
                    _as_written(kind, name) for name, kind in zip(lines.columns, lines.types, strict=True)
                ]
                if kinds != lines.types:
                    columns_of = dict(zip(lines.columns, map(str, kinds), strict=True))
                    lines = connection.read_json(str(self._aside), columns=columns_of, **how)
                lines.write_parquet(str(columns), compression="zstd")
            columns.replace(self._aside)
        except duckdb.Error as error:
            raise WriteError(
                f"{self.path}: these rows do not fit into Parquet ({error}); use .jsonl.zst"
            ) from error
        finally:
            columns.unlink(missing_ok=True)

    def _refused(self, error: OSError) -> WriteError:
        return WriteError(f"{self.path}: not written ({error.strerror or error}); nothing is left of it")


def _compressor(path: Path) -> Callable[[IO[bytes]], Any]:
    if path.suffix not in COMPRESSED:
        return lambda file: file
    import pyarrow as pa

    return lambda file: pa.CompressedOutputStream(pa.PythonFile(file, mode="w"), COMPRESSED[path.suffix])


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
