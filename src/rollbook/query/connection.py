"""A connection to DuckDB that can read the named files and do nothing else.

The database is in memory. Once the views are made it is locked: DuckDB may touch no file but those they read,
load no extension and change no setting.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

import duckdb
import numpy as np

from rollbook.errors import UsageError
from rollbook.query.sql import literal
from rollbook.records.rows import duckdb_pattern
from rollbook.runs.resolve import DataFile

MEMORY = "1GB"
Watch = Callable[[float], None]  # told the share of a query that is done, from 0 to 1
_MOST_THREADS = 8  # each has its own buffers, which must fit the memory
_BATCH = 20_000
_WATCHED_S = 0.2
_Result = TypeVar("_Result")


class Kept:
    """The rows of a query in a table, to be asked many questions; what does not fit is spilled."""

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._connection = connection

    def ask(self, question: str, parameters: Sequence[object] = ()) -> Iterator[tuple[Any, ...]]:
        cursor = self._connection.cursor().execute(question, list(parameters))
        while chunk := cursor.fetchmany(_BATCH):
            yield from chunk

    def one(self, question: str, parameters: Sequence[object] = ()) -> tuple[Any, ...]:
        return next(self.ask(question, parameters))

    def numbers(self, question: str, parameters: Sequence[object] = ()) -> np.ndarray[Any, Any]:
        """The one column of an answer, of whole numbers."""
        (column,) = self._connection.cursor().execute(question, list(parameters)).fetchnumpy().values()
        return np.asarray(column, dtype=np.int64)

    def run(self, statement: str, parameters: Sequence[object] = ()) -> None:
        self._connection.cursor().execute(statement, list(parameters))

    def add(self, table: str, **columns: np.ndarray[Any, Any]) -> None:
        """Add rows to another table beside it, which the first of them make."""
        cursor = self._connection.cursor()
        cursor.register("_batch", columns)
        known = cursor.execute("SELECT table_name FROM duckdb_tables()").fetchall()
        into = f"INSERT INTO {table}" if (table,) in known else f"CREATE TABLE {table} AS"
        cursor.execute(f"{into} FROM _batch")
        cursor.unregister("_batch")

    def __enter__(self) -> Kept:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()


def open_connection(memory: str, scratch: Path | None = None) -> duckdb.DuckDBPyConnection:
    """`scratch` is where to spill; DuckDB makes it when it has to, and removes it when it closes."""
    spill = (scratch or Path(tempfile.gettempdir())) / f"rollbook-query-{secrets.token_hex(8)}"
    config: dict[str, str | bool | int | float | list[str]] = {
        "memory_limit": memory,
        "threads": min(os.cpu_count() or 1, _MOST_THREADS),
        "temp_directory": str(spill),
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
        "allow_community_extensions": False,
        "python_enable_replacements": False,
    }
    try:
        return duckdb.connect(config=config)
    except duckdb.Error as error:
        raise UsageError(f"--memory {memory}: {error}; write 512MB, 4GB, ...") from error


def lock(connection: duckdb.DuckDBPyConnection, files: Iterable[DataFile]) -> None:
    paths = {text for file in files for text in (str(file.path), duckdb_pattern(file.path))}
    listed = ", ".join(literal(path) for path in sorted(paths))
    connection.execute(f"SET allowed_paths = [{listed}]")
    connection.execute("SET enable_progress_bar = true")  # or it would not know how far it is
    connection.execute("SET enable_progress_bar_print = false")  # it would stand in the middle of the output
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


def interruptible(
    connection: duckdb.DuckDBPyConnection, work: Callable[[], _Result], watch: Watch | None = None
) -> _Result:
    """Do the work in a thread: DuckDB does not look for Ctrl-C while it fetches, but this thread does."""
    with ThreadPoolExecutor(1) as pool:
        try:
            future = pool.submit(work)
            while watch is not None and wait([future], _WATCHED_S).not_done:
                watch(max(0.0, connection.query_progress()) / 100)
            return future.result()
        except (KeyboardInterrupt, SystemExit):
            connection.interrupt()
            raise
