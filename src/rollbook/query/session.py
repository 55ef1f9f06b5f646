"""One query: a connection that can read the named files and do nothing else.

The database is in memory and holds views only. Once they are made, DuckDB may touch no file but those they
read, load no extension and change no setting; a query that is not a SELECT is refused before, also one that
hides a COPY in a WITH clause. What DuckDB says about a bad line is looked up in the file, because its line
numbers are not to be relied on; a line that a running writer was in the middle of is not an error.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import duckdb

from rollbook.errors import RollbookError, UsageError
from rollbook.query.bad_lines import check_lines, check_rows
from rollbook.query.connection import MEMORY, Kept, Watch, interruptible, lock, open_connection
from rollbook.query.guard import may_name, parsed
from rollbook.query.rows import MACROS as ROW_MACROS
from rollbook.query.runs import history_rows, row_of
from rollbook.query.scan import MACROS as SCAN_MACROS
from rollbook.query.scan import Scan, ends_in_the_middle
from rollbook.query.schema import COLUMNS, VIEWS
from rollbook.query.sql import quoted
from rollbook.query.suggest import explain_error
from rollbook.query.task_ids import EMPTY, FUNCTIONS, add_functions
from rollbook.query.views import MACROS, OWNERS, Wanted, name_tasks, view_sql
from rollbook.records.field_paths import FieldPath
from rollbook.records.rows import check_is_whole
from rollbook.runs.resolve import DataFile, Role, Sources, find_sources

if TYPE_CHECKING:
    import pyarrow

    from rollbook.query.token_table import TokenTable

_LARGEST_OBJECT, _LARGEST_EVER = 16 << 20, 1 << 30
_RETRIES = 8
_BATCH = 1000
_READS: dict[str, tuple[Role, ...]] = {
    "runs": (),
    "metrics": (Role.METRICS, Role.TRAINER_LOG),
    "rollouts": (Role.SUMMARIES, Role.ROWS),
    "steps": (Role.SUMMARIES, Role.ROWS),
    "transcripts": (Role.TRANSCRIPTS, Role.ROWS),
    "tokens": (),  # not DuckDB's to read: see token_table
    "checkpoints": (Role.CHECKPOINTS,),
    "failures": (Role.SUMMARIES, Role.FAILURES),
    "history": (),
}
_OF_TASKS = frozenset({"rollouts", "steps", "transcripts", "failures"})
_IN_FILE = re.compile(r'in file "(.*?)", (?:at byte \d+ )?in line \d+')
_Result = TypeVar("_Result")


class Answer(NamedTuple):
    columns: list[str]
    types: list[str]
    batches: Iterator[list[tuple[Any, ...]]]
    connection: duckdb.DuckDBPyConnection


class Session:
    def __init__(
        self,
        paths: Iterable[str | Path] | Sources,
        *,
        memory: str = MEMORY,
        scratch: Path | None = None,
        watch: Watch | None = None,
        values: Sequence[FieldPath] = (),
        in_order: bool = False,
        numbered: bool = False,
    ) -> None:
        """`scratch` is where to spill what does not fit into the memory.

        Over `rows_of` files `rollouts` may have further columns: `values`, as JSON in v0, v1, ..., and
        `numbered` the number of the row in `_n`, for which the rows are read by one thread. With `in_order`
        rows come in the order of their files, their tasks by plain ids, with what tells these apart beside
        them (`task_ids.TASK`).
        """
        self.sources = paths if isinstance(paths, Sources) else find_sources(paths)
        self._memory, self._scratch, self._watch = memory, scratch, watch
        self._values, self._in_order, self._numbered = values, in_order, numbered
        self._unfinished: set[Path] = set()
        self._largest_object = _LARGEST_OBJECT
        self._tokens: TokenTable | None = None

    def run(self, sql: str) -> Answer:
        """The rows of a query, a batch at a time."""
        return self._persist(sql, self._answer)

    def keep(self, sql: str, table: str) -> Kept:
        """The rows of a query in a table, to ask them more; close it when that is done."""

        def make(connection: duckdb.DuckDBPyConnection, sql: str) -> Kept:
            connection.execute(f"CREATE TABLE {table} AS {sql}")
            return Kept(connection)

        return self._persist(sql, make)

    def relation(self, sql: str) -> duckdb.DuckDBPyRelation:
        """The result as DuckDB's own object: it prints as a table, has `.df()`, `.arrow()`, `.fetchall()`."""
        return self._persist(sql, _executed)

    @contextmanager
    def arrow(self, sql: str) -> Iterator[tuple[pyarrow.Schema, Iterator[pyarrow.RecordBatch]]]:
        """The rows as Arrow's batches, with their types."""
        connection, schema, batches = self._persist(sql, _arrow)
        with contextlib.closing(connection):
            yield schema, iter(lambda: interruptible(connection, lambda: next(batches, None)), None)

    def columns(self, view: str) -> list[tuple[str, str]]:
        """The names and types of a view over these files."""
        answer = self.run(f"DESCRIBE {view}")
        return [(row[0], row[1]) for batch in answer.batches for row in batch]

    def _persist(self, sql: str, act: Callable[[duckdb.DuckDBPyConnection, str], _Result]) -> _Result:
        sql, tree = parsed(sql)
        self._unfinished = set()  # each time anew: a writer may have gone on, or made a mess of it
        with_names, files = self._names_tasks(sql, tree), self.files(sql)
        self._look_for_unfinished(files)
        for _ in range(_RETRIES):
            connection, before = self._connect(sql, files, with_names)

            def work() -> _Result:
                if before:  # noqa: B023 - called at once
                    connection.execute(before)  # noqa: B023
                return act(connection, sql)  # noqa: B023

            try:
                return interruptible(connection, work, self._watch)
            except (duckdb.Error, RuntimeError) as error:
                connection.close()
                self._learn(error)
        raise RollbookError("the files change faster than they can be read; try again")

    def _answer(self, connection: duckdb.DuckDBPyConnection, sql: str) -> Answer:
        connection.execute(sql)
        described = connection.description or []
        first = connection.fetchmany(_BATCH)
        return Answer(
            [column[0] for column in described],
            [str(column[1]) for column in described],
            self._batches(connection, first),
            connection,
        )

    def _batches(
        self, connection: duckdb.DuckDBPyConnection, batch: list[tuple[Any, ...]]
    ) -> Iterator[list[tuple[Any, ...]]]:
        while batch:
            yield batch
            try:
                batch = interruptible(connection, lambda: connection.fetchmany(_BATCH))
            except (duckdb.Error, RuntimeError) as error:
                self._learn(error)
                raise RollbookError("a file changed while it was read; try again") from error

    def files(self, sql: str) -> list[DataFile]:
        """The files that a query reads."""
        roles = {role for name in _views_in(sql) for role in _READS[name]}
        if self._names_tasks(*parsed(sql)):
            roles |= {Role.SUMMARIES, Role.ROWS}
        return self.sources.of(*roles)

    def _names_tasks(self, sql: str, tree: Any) -> bool:
        """Whether it matters what tasks are shown as."""
        is_about_tasks = not _OF_TASKS.isdisjoint(_views_in(sql)) and may_name(tree, {"task_id", "key"})
        return is_about_tasks and not self._in_order

    def _connect(
        self, sql: str, files: list[DataFile], with_names: bool
    ) -> tuple[duckdb.DuckDBPyConnection, str]:
        """A connection with the views, and the statements that are to be run on it before the query."""
        wanted = Wanted(
            self.sources,
            Scan(frozenset(self._unfinished), self._largest_object),
            with_row=re.search(r"\brow\b", sql, re.IGNORECASE) is not None,
            in_order=self._in_order,
            values=self._values,
            numbered=self._numbered,
            with_names=with_names,
        )
        connection = open_connection(self._memory, self._scratch)
        try:
            add_functions(connection)
            connection.execute(SCAN_MACROS + ROW_MACROS + MACROS + EMPTY)
            _add_owners(connection, files)
            for name in _views_in(sql):
                if name == "runs":
                    _add_table(connection, name, map(row_of, self.sources.owners))
                elif name == "history":
                    _add_table(connection, name, history_rows(self.sources.histories))
                elif name == "tokens":
                    self._add_tokens(connection)
                else:
                    connection.execute(f"CREATE VIEW {name} AS {view_sql(name, wanted)}")
            lock(connection, files)
        except duckdb.Error as error:
            connection.close()
            raise RollbookError(f"the files cannot be read: {_first_line(error)}") from error
        return connection, name_tasks(wanted) if with_names else ""

    def _add_tokens(self, connection: duckdb.DuckDBPyConnection) -> None:
        from rollbook.query.token_table import TokenTable

        self._tokens = TokenTable(self.sources.tokens)
        connection.register("tokens", self._tokens)

    def _look_for_unfinished(self, files: Iterable[DataFile]) -> None:
        for file in files:
            if file.path.suffix == ".zst":
                check_is_whole(file.path)  # DuckDB takes one that was cut short for an empty one
            elif file.is_plain and file.end is None and ends_in_the_middle(file.path):
                check_lines(file)
                self._unfinished.add(file.path)

    def _learn(self, error: Exception) -> None:
        """Raise what a person should read, or return after a change that makes another try worth while."""
        if self._tokens is not None and self._tokens.error is not None:
            raise self._tokens.error from None
        text = str(error)
        if not isinstance(error, duckdb.Error):
            if "interrupted" in text:
                raise KeyboardInterrupt from error
            raise error
        if "maximum_object_size" in text and self._largest_object < _LARGEST_EVER:
            self._largest_object *= 4
            return
        if found := _IN_FILE.search(text):
            self._find_bad_line(Path(found[1]), error)
            return
        if isinstance(error, duckdb.IOException) or "UDF" in text or any(map(text.__contains__, FUNCTIONS)):
            check_rows(self.sources.files)  # DuckDB does not say which file it was
        raise explain_error(error, self._memory, self._known_columns) from error

    def _known_columns(self) -> dict[str, list[str]]:
        known = {name: [column.name for column in columns] for name, columns in COLUMNS.items()}
        known["metrics"] = [name for name, _ in self.columns("metrics")]
        return known

    def _find_bad_line(self, path: Path, error: duckdb.Error) -> None:
        file = next((file for file in self.sources.files if file.path == path), None)
        if file is not None and not file.is_plain:
            check_rows([file])
        if file is None or not file.is_plain or path in self._unfinished:
            raise RollbookError(str(error).split("\n\n")[0]) from error
        check_lines(file)
        self._unfinished.add(path)  # a line was being written when DuckDB came to it


def _views_in(sql: str) -> list[str]:
    return [name for name in VIEWS if re.search(rf"\b{name}\b", sql, re.IGNORECASE)] or list(VIEWS)


def _executed(connection: duckdb.DuckDBPyConnection, sql: str) -> duckdb.DuckDBPyRelation:
    relation = connection.sql(sql).materialize()  # now, so that what goes wrong is said here
    for name in FUNCTIONS:
        with contextlib.suppress(duckdb.Error):
            # A relation that lives to the end of the program would hold it, and DuckDB complain of a leak.
            connection.remove_function(name)
    return relation


def _arrow(
    connection: duckdb.DuckDBPyConnection, sql: str
) -> tuple[duckdb.DuckDBPyConnection, pyarrow.Schema, Iterator[pyarrow.RecordBatch]]:
    relation = connection.sql(sql)
    if any("UHUGEINT" in str(kind) for kind in relation.types):  # DuckDB would hand it over as another number
        raise UsageError("Arrow and Parquet have no UHUGEINT; cast it: ::VARCHAR or ::HUGEINT")
    reader = relation.to_arrow_reader(_BATCH)
    first = next(reader, None)  # now, so that what goes wrong at once can be mended
    batches = itertools.chain([] if first is None else [first], reader)
    return connection, reader.schema, batches


def _add_owners(connection: duckdb.DuckDBPyConnection, files: list[DataFile]) -> None:
    connection.execute(f"CREATE TABLE {OWNERS} (_path VARCHAR, _run VARCHAR, _split VARCHAR)")
    if files:
        columns = zip(*((str(file.path), file.run, file.split) for file in files), strict=True)
        values = [list(column) for column in columns]
        connection.execute(f"INSERT INTO {OWNERS} SELECT unnest(?), unnest(?), unnest(?::VARCHAR[])", values)


def _add_table(connection: duckdb.DuckDBPyConnection, name: str, rows: Iterable[dict[str, Any]]) -> None:
    columns = COLUMNS[name]
    declared = ", ".join(f"{quoted(column.name)} {column.type}" for column in columns)
    connection.execute(f"CREATE TABLE {name} ({declared})")
    places = ", ".join("_utc(?)" if column.type == "TIMESTAMP" else "?" for column in columns)
    for row in rows:
        values = [row.get(column.name) for column in columns]
        connection.execute(f"INSERT INTO {name} VALUES ({places})", values)


def _first_line(error: duckdb.Error) -> str:
    """Without the statement, which is ours and means nothing to who typed another."""
    return str(error).split("\n")[0]
