"""`rollbook history`: every run there was, newest first; `show` one, `note` something on one."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollbook.cli.common import (
    ARTIFACTS,
    STYLES,
    Artifacts,
    AsJson,
    duration,
    local_time,
    number,
    open_ledger,
    print_json,
)
from rollbook.cli.lineage import tree_lines
from rollbook.errors import UsageError

if TYPE_CHECKING:
    from rollbook.runs.jobs.ledger import RunRecord
    from rollbook.runs.lineage import Node

app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, invoke_without_command=True, no_args_is_help=False
)


@app.callback(invoke_without_command=True)
def history(
    context: typer.Context,
    state: Annotated[str | None, typer.Option(help="only runs of this status")] = None,
    kind: Annotated[str | None, typer.Option(help="only runs of this kind")] = None,
    since: Annotated[str | None, typer.Option(help="only runs started on or after this date")] = None,
    grep: Annotated[str | None, typer.Option(help="only runs whose record holds this text")] = None,
    limit: Annotated[int, typer.Option(help="at most so many; 0 for all", min=0)] = 20,
    as_csv: Annotated[bool, typer.Option("--csv", help="print CSV")] = False,
    artifacts: Artifacts = ARTIFACTS,
    as_json: AsJson = False,
) -> None:
    """List the runs, newest first."""
    context.obj = (artifacts, as_json)
    if context.invoked_subcommand is not None:
        return
    from rollbook.runs.jobs.ledger import Status

    if state is not None and state not in list(Status):
        raise UsageError(f"--state {state!r} is not one of {', '.join(Status)}")
    everything = open_ledger(artifacts).records()
    found = [record for record in reversed(everything) if _matches(record, state, kind, since, grep)]
    shown = found[:limit] if limit else found
    if as_json:
        print_json([record.to_plain() for record in shown])
    elif as_csv:
        _print_csv(shown)
    else:
        _print_table(shown)
        if len(shown) < len(found):
            print(f"{len(found) - len(shown)} more; --limit 0 shows all")


@app.command()
def show(
    context: typer.Context,
    ref: Annotated[
        str, typer.Argument(help="the run: its id, the beginning of it, its name, or latest")
    ] = "latest",
    artifacts: Annotated[Path | None, typer.Option("--artifacts", help="the run history's directory")] = None,
    as_json: AsJson = False,
) -> None:
    """Everything the history knows about one run."""
    import yaml

    from rollbook.cli.output import printable

    place = artifacts or context.obj[0]
    record = open_ledger(place).get(ref)
    plain, node = record.to_plain(), _lineage_of(record, place)
    if as_json or context.obj[1]:
        print_json({**plain, "lineage": node})
        return
    print(printable(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)), end="")
    if node is not None and node.parents:
        print("\nmade from:")
        for line in tree_lines(node):
            print(printable(line))


@app.command()
def note(
    context: typer.Context,
    ref: Annotated[str, typer.Argument(help="the run: its id, the beginning of it, its name, or latest")],
    text: Annotated[str, typer.Argument(help="what to remember about it")],
    artifacts: Annotated[Path | None, typer.Option("--artifacts", help="the run history's directory")] = None,
    as_json: AsJson = False,
) -> None:
    """Add a note to a run."""
    ledger = open_ledger(artifacts or context.obj[0])
    record = ledger.get(ref)
    ledger.note(record.id, text)
    if as_json or context.obj[1]:
        print_json({"id": record.id, "note": text})
    else:
        print(f"noted on {record.id}")


def _lineage_of(record: RunRecord, artifacts: Path) -> Node | None:
    """What its files say it was made from; None where they are gone, or nobody knows where they are."""
    from rollbook.runs.lineage import lineage
    from rollbook.runs.references import find

    try:
        return lineage(find(record.id, artifacts).path)
    except UsageError:
        return None


def _matches(
    record: RunRecord, state: str | None, kind: str | None, since: str | None, grep: str | None
) -> bool:
    if state is not None and record.status != state:
        return False
    if kind is not None and record.kind != kind:
        return False
    if since is not None and (record.started_at or "") < since:
        return False
    return grep is None or grep.lower() in str(record.to_plain()).lower()


def _row(record: RunRecord) -> dict[str, Any]:
    metrics = record.metrics or {}
    git = record.git or {}
    sha = str(git.get("sha") or "")[:8] + ("+" if git.get("dirty") else "")
    return {
        "id": record.id,
        "status": record.status,
        "kind": record.kind or "-",
        "started": local_time(record.started_at),
        "took": duration(record.duration_s),
        "steps": metrics.get("steps", "-"),
        "loss": number(metrics.get("last_loss")),
        "rollouts": f"{metrics['ok']}/{metrics.get('expected')}" if "ok" in metrics else "-",
        "reward": number(metrics.get("reward_mean")),
        "checkpoint": (record.checkpoint or {}).get("step", "-"),
        "git": sha or "-",
        "note": record.notes[-1].text if record.notes else (record.reason or ""),
    }


def _print_table(records: list[RunRecord]) -> None:
    from rich.table import Table
    from rich.text import Text

    from rollbook.cli.output import console, printable

    if not records:
        print("no run matches; `rollbook history` without options lists all there are")
        return
    rows = [_row(record) for record in records]
    table = Table(box=None, pad_edge=False, header_style="bold")
    # What no run has is left out: a history of trainings has no rollouts, one of collections no loss.
    shown = [name for name in rows[0] if any(row[name] not in ("-", "") for row in rows)]
    for name in shown:
        table.add_column(name, no_wrap=name != "note", overflow="fold")
    for row in rows:
        cells = [Text(printable(str(row[name]))) for name in shown]
        cells[1].stylize(STYLES.get(str(row["status"]), ""))
        table.add_row(*cells)
    console().print(table)


def _print_csv(records: list[RunRecord]) -> None:
    rows = [_row(record) for record in records]
    if rows:
        writer = csv.DictWriter(sys.stdout, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
