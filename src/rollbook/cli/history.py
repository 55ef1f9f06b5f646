"""`rollbook history`: every run there was, newest first; `show` one, `note` something on one."""

from __future__ import annotations

import csv
import re
import sys
from datetime import datetime, timedelta
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

_SHOWN_RUNS = 20
# What a narrow terminal leaves out first comes last. All columns but the note are shown whole or not at all.
_PRIORITY = (
    "id", "status", "reward", "std error", "loss", "started", "rollouts", "steps", "checkpoint", "took",
    "kind", "git", "note",
)  # fmt: skip
_NARROWEST_NOTE = 16
_GAP = 2
_AGO = re.compile(r"(\d+)\s*([dhm])")
_UNITS = {"d": "days", "h": "hours", "m": "minutes"}

app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, invoke_without_command=True, no_args_is_help=False
)


@app.callback(invoke_without_command=True)
def history(
    context: typer.Context,
    state: Annotated[str | None, typer.Option(help="only runs of this status")] = None,
    kind: Annotated[str | None, typer.Option(help="only runs of this kind")] = None,
    since: Annotated[
        str | None, typer.Option(help="only runs started since then: 2026-01-31, yesterday, 12h")
    ] = None,
    grep: Annotated[str | None, typer.Option(help="only runs whose record holds this text")] = None,
    limit: Annotated[
        int | None,
        typer.Option(help=f"show at most N (0 = all; {_SHOWN_RUNS} in a table, else all)", min=0),
    ] = None,
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
    after = None if since is None else _moment(since, datetime.now().astimezone())
    everything = open_ledger(artifacts).records()
    found = [record for record in reversed(everything) if _matches(record, state, kind, after, grep)]
    if limit is None:
        limit = 0 if as_json or as_csv else _SHOWN_RUNS
    shown = found[:limit] if limit else found
    if as_json:
        print_json([record.to_plain() for record in shown])
    elif as_csv:
        _print_csv(shown)
    elif not everything:
        print(f"no run yet in {artifacts}/; try: rollbook run NAME -- COMMAND")
    elif not shown:
        print("no run matches; `rollbook history` without options lists all there are")
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
    record: RunRecord, state: str | None, kind: str | None, after: datetime | None, grep: str | None
) -> bool:
    if state is not None and record.status != state:
        return False
    if kind is not None and record.kind != kind:
        return False
    if after is not None and not _began_after(record, after):
        return False
    return grep is None or grep.lower() in str(record.to_plain()).lower()


def _began_after(record: RunRecord, moment: datetime) -> bool:
    try:
        return datetime.fromisoformat(record.started_at or "") >= moment
    except (ValueError, TypeError):
        return False


def _moment(text: str, now: datetime) -> datetime:
    """A date (its midnight here), a date and time, today, yesterday, or how long ago: 3d, 12h, 30m."""
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    if text in ("today", "yesterday"):
        return midnight - timedelta(days=text == "yesterday")
    if ago := _AGO.fullmatch(text.strip()):
        return now - timedelta(**{_UNITS[ago[2]]: int(ago[1])})
    try:
        return datetime.fromisoformat(text).astimezone()
    except ValueError:
        raise UsageError(
            f"--since {text!r} is not a time; write 2026-01-31, 2026-01-31T12:00, today, yesterday, 3d or 12h"
        ) from None


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
        "std error": number(metrics.get("reward_std_error")),
        "checkpoint": (record.checkpoint or {}).get("step", "-"),
        "git": sha or "-",
        "note": record.notes[-1].text if record.notes else (record.reason or ""),
    }


def _print_table(records: list[RunRecord]) -> None:
    from rich.table import Table
    from rich.text import Text

    from rollbook.cli.output import console, printable

    rows = [{name: printable(str(value)) for name, value in _row(record).items()} for record in records]
    screen = console()
    # What no run has is left out: a history of trainings has no rollouts, one of collections no loss.
    used = [name for name in rows[0] if any(row[name] not in ("-", "") for row in rows)]
    widths = {name: max(len(name), *(Text(row[name]).cell_len for row in rows)) for name in used}
    shown = _fitting(used, widths, screen.width)
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for name in shown:
        is_note = name == "note"
        table.add_column(
            name, no_wrap=not is_note, overflow="fold", min_width=None if is_note else widths[name]
        )
    for row in rows:
        cells = [Text(row[name]) for name in shown]
        cells[1].stylize(STYLES.get(row["status"], ""))
        table.add_row(*cells)
    screen.width = max(screen.width, sum(widths[name] + _GAP for name in shown if name != "note"))
    screen.print(table)
    if left := [name for name in used if name not in shown]:
        print(f"(not wide enough for {', '.join(left)}; --json and --csv have them)")


def _fitting(used: list[str], widths: dict[str, int], width: int) -> list[str]:
    """The columns that a terminal has room for, in their order; the first two always."""
    left, kept = width, set()
    for place, name in enumerate(name for name in _PRIORITY if name in used):
        needed = min(widths[name], _NARROWEST_NOTE) if name == "note" else widths[name]
        if place < 2 or needed <= left:
            kept.add(name)
            left -= needed + _GAP
    return [name for name in used if name in kept]


def _print_csv(records: list[RunRecord]) -> None:
    from rollbook.records.printable import csv_cell

    rows = [{name: csv_cell(value) for name, value in _row(record).items()} for record in records]
    if rows:
        writer = csv.DictWriter(sys.stdout, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
