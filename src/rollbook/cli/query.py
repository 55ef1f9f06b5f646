"""`rollbook query "select ..." PATH...`: SQL over any number of runs and collections."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollbook.cli.common import AsJson, print_json
from rollbook.cli.data import tidy_end
from rollbook.errors import UsageError

if TYPE_CHECKING:
    from rollbook.query.output import Format
    from rollbook.query.session import Answer, Session

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_SHOWN_ROWS = 40
_NARROWEST = 16  # what a column of a table needs at least
_LONGEST_CELL = 200
_NUMBERS = ("BIGINT", "DOUBLE", "INTEGER", "HUGEINT")
_HOW_TO = 'type: rollbook query "select ..." PATH...'


@app.command()
def query(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SQL PATH...", help="a query (- reads it from stdin), then runs and collections"
        ),
    ] = None,
    schema: Annotated[bool, typer.Option("--schema", help="print the views and their columns")] = False,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="a file that holds the query")] = None,
    kind: Annotated[
        str | None, typer.Option("--format", help="table, csv, json, jsonl or parquet (with -o)")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="a file to write; its ending is the format")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace the output")] = False,
    memory: Annotated[
        str, typer.Option("--memory", help="the most a query may use before it spills")
    ] = "1GB",
    as_json: AsJson = False,
) -> None:
    """SQL over runs and collections, read in place: runs, metrics, rollouts, steps, transcripts, tokens,
    checkpoints, failures."""
    if schema:
        _print_schema(words or [], as_json)
        return
    sql, paths = _split(words or [], file)
    chosen = _format(kind, output, as_json)
    with tidy_end():
        _answer(sql, paths, chosen, output, overwrite=overwrite, memory=memory)


def _answer(
    sql: str, paths: list[str], chosen: Format, output: Path | None, *, overwrite: bool, memory: str
) -> None:
    from rollbook.cli.output import printable
    from rollbook.query.session import Session

    session = Session(paths, memory=memory)
    if skipped := session.sources.skipped:
        more = f", and {len(skipped) - 1} more" if len(skipped) > 1 else ""
        print(printable(f"skipped {skipped[0].path}: {skipped[0].why}{more}"), file=sys.stderr)
    if output is not None:
        from rollbook.query.output import write_file

        count = write_file(session, sql, output, chosen, overwrite=overwrite)
        print(f"{output}: {_rows(count)}", file=sys.stderr)
    else:
        _print(session, sql, chosen)


def _split(words: list[str], file: Path | None) -> tuple[str, list[str]]:
    if file is not None:
        try:
            sql = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--file {file}: cannot be read: {error}") from error
    else:
        if not words:
            raise UsageError(f"no query; {_HOW_TO}")
        sql, *words = words
        if sql == "-":
            sql = sys.stdin.read()
        elif sql and " " not in sql and Path(sql).exists():
            raise UsageError(f"{sql} is a path; the query comes first; {_HOW_TO}")
    if not sql.strip():
        raise UsageError(f"the query is empty; {_HOW_TO}")
    if not words:
        raise UsageError(f"no path; name run directories, collections or directories of them; {_HOW_TO}")
    return sql, words


def _format(kind: str | None, output: Path | None, as_json: bool) -> Format:
    from rollbook.query.output import Format, format_of

    if kind is not None and kind not in list(Format):
        raise UsageError(f"--format {kind}: choose one of {', '.join(Format)}")
    if output is not None:
        chosen = Format(kind) if kind else Format.JSON if as_json else format_of(output)
        if chosen is Format.TABLE:
            raise UsageError("a table is for the screen; write csv, json, jsonl or parquet")
        return chosen
    if kind == Format.PARQUET:
        raise UsageError("Parquet goes to a file; add -o FILE.parquet")
    return Format(kind) if kind else Format.JSON if as_json else Format.TABLE


def _print(session: Session, sql: str, kind: Format) -> None:
    from rollbook.query.output import Format, write_text

    answer = session.run(sql)
    if kind is not Format.TABLE:
        write_text(answer, sys.stdout, kind)
    elif answer.columns[:2] == ["explain_key", "explain_value"]:
        from rollbook.cli.output import printable

        print("\n".join(printable(str(row[1])) for batch in answer.batches for row in batch))
    else:
        _print_table(answer)


def _print_table(answer: Answer) -> None:
    """The first rows, and how many there are: nothing is left out unsaid."""
    from rich.table import Table
    from rich.text import Text

    from rollbook.cli.output import console, printable

    screen = console()
    fitting = max(1, screen.width // _NARROWEST)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, kind in list(zip(answer.columns, answer.types, strict=True))[:fitting]:
        table.add_column(Text(printable(name)), no_wrap=True, overflow="ellipsis")
        if kind in _NUMBERS:
            table.columns[-1].justify = "right"
    count = 0
    for batch in answer.batches:
        for row in batch[: max(0, _SHOWN_ROWS - count)]:
            table.add_row(*(Text(_cell(value)) for value in row[:fitting]))
        count += len(batch)
    screen.print(table, soft_wrap=False)
    shown = min(count, _SHOWN_ROWS)
    note = _rows(count) if shown == count else f"showing {shown} of {_rows(count)}"
    if len(answer.columns) > fitting:
        note += f", {fitting} of {len(answer.columns)} columns"
    if shown < count or len(answer.columns) > fitting:
        note += "; use --format csv or -o FILE for all"
    screen.print(f"({note})")


def _cell(value: Any) -> str:
    from rollbook.cli.output import printable

    if value is None:
        return ""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    if len(text) > _LONGEST_CELL:
        text = text[:_LONGEST_CELL] + "…"
    return printable(text).replace("\n", "⏎").replace("\t", " ")


def _rows(count: int) -> str:
    return f"{count} row{'' if count == 1 else 's'}"


def _print_schema(paths: list[str], as_json: bool) -> None:
    from rollbook.cli.output import printable
    from rollbook.query.schema import COLUMNS, MEANINGS
    from rollbook.query.session import Session

    columns = {name: [column._asdict() for column in known] for name, known in COLUMNS.items()}
    if paths:
        known = {column.name: column.meaning for column in COLUMNS["metrics"]}
        columns["metrics"] = [
            {"name": name, "type": kind, "meaning": known.get(name, "")}
            for name, kind in Session(paths).columns("metrics")
        ]
    if as_json:
        print_json({name: {"row": MEANINGS[name], "columns": columns[name]} for name in columns})
        return
    for name, listed in columns.items():
        print(f"{name}: one row is {MEANINGS[name]}")
        width = max(len(column["name"]) for column in listed)
        for column in listed:
            print(
                printable(f"  {column['name']:<{width}}  {column['type']:<9}  {column['meaning']}").rstrip()
            )
        if name == "metrics" and not paths:
            print("  ... and a column for every key of the files: rollbook query --schema PATH...")
        print()
