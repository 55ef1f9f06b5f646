"""Options and helpers that the commands about runs share."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollbook.errors import UsageError

if TYPE_CHECKING:
    from rollbook.runs.jobs.ledger import Ledger

Artifacts = Annotated[
    Path, typer.Option("--artifacts", envvar="ROLLBOOK_ARTIFACTS", help="the directory of the run history")
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]
ARTIFACTS = Path("artifacts")

# Of the commands that train.
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value on top of it")]
Resume = Annotated[bool, typer.Option("--resume", help="continue from the newest complete checkpoint")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="start over; what is there is kept under superseded/")
]
Detach = Annotated[bool, typer.Option("--detach", help="start it in the background and return")]

STYLES = {
    "running": "cyan",
    "completed": "green",
    "failed": "red",
    "interrupted": "yellow",
    "lost": "magenta",
}


def open_ledger(artifacts: Path) -> Ledger:
    """The history; a directory that was named and is not there is an error, not an empty history."""
    from rollbook.runs.jobs.ledger import Ledger

    if artifacts != ARTIFACTS and not artifacts.is_dir():
        raise UsageError(f"--artifacts {artifacts}: no such directory")
    return Ledger(artifacts)


def why_failed(reason: str | None, error: dict[str, Any] | None, exit_code: int | None) -> str | None:
    """One line: the reason, else the error with its type, else the exit code."""
    if reason:
        return reason
    if error and error.get("message"):
        return f"{error['type']}: {error['message']}" if error.get("type") else str(error["message"])
    return f"exit code {exit_code}" if exit_code else None


def print_json(value: Any) -> None:
    from rollbook.records.plain import encode_document, to_plain
    from rollbook.records.printable import printable_json

    print(printable_json(encode_document(to_plain(value)).decode()), end="")


def duration(seconds: float | None) -> str:
    """`75` as `1m 15s`."""
    if seconds is None:
        return "-"
    left = round(seconds)
    parts: list[str] = []
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count or (unit == "s" and not parts):
            parts.append(f"{count}{unit}")
    return " ".join(parts[:2])


def local_time(utc: str | None) -> str:
    """A UTC time of the history in the reader's own zone."""
    if not utc:
        return "-"
    try:
        return datetime.fromisoformat(utc).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except ValueError:
        return utc


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
