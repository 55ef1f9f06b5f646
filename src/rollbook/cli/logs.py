"""`rollbook logs [-f] RUN`: what a run printed."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollbook.cli.common import ARTIFACTS, Artifacts, AsJson, print_json
from rollbook.errors import RollbookError

if TYPE_CHECKING:
    from rollbook.records.printable import ProgramOutput

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_POLL_S = 0.2
_CHUNK = 1 << 16


@app.command()
def logs(
    ref: Annotated[
        str, typer.Argument(help="the run: its id, the beginning of it, its name, or latest")
    ] = "latest",
    follow: Annotated[bool, typer.Option("-f", "--follow", help="go on until the run ends")] = False,
    lines: Annotated[int | None, typer.Option("-n", "--lines", help="only the last N lines")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="every byte as it was printed, escape sequences included")
    ] = False,
    artifacts: Artifacts = ARTIFACTS,
    as_json: AsJson = False,
) -> None:
    """Print the log of a run."""
    from rollbook.records.printable import ProgramOutput
    from rollbook.runs.jobs.ledger import Ledger

    ledger = Ledger(artifacts)
    record = ledger.get(ref)
    if not record.log:
        raise RollbookError(f"{record.id} has no log")
    path = ledger.resolve(record.log)
    if not path.exists():
        raise RollbookError(f"{path}: the log of {record.id} is gone")
    if as_json:
        text = path.read_text(errors="replace").splitlines()
        print_json({"id": record.id, "log": str(path), "lines": text[-lines:] if lines else text})
        return
    offset = _start_of_last(path, lines) if lines else 0
    cleaned = None if raw else ProgramOutput(keeps_bars=False)
    while True:
        running = follow and ledger.get(record.id).is_running
        offset = _copy(path, offset, cleaned)
        if not running:  # asked before the last copy, so nothing it printed at the end is missed
            return
        time.sleep(_POLL_S)


def _copy(path: Path, offset: int, cleaned: ProgramOutput | None) -> int:
    with path.open("rb") as file:
        file.seek(offset)
        while chunk := file.read(_CHUNK):
            sys.stdout.buffer.write(cleaned.feed(chunk) if cleaned else chunk)
            offset += len(chunk)
    sys.stdout.buffer.flush()
    return offset


def _start_of_last(path: Path, lines: int) -> int:
    """The offset of the last N lines, read from the end."""
    with path.open("rb") as file:
        position = file.seek(0, 2)
        newlines = 0
        while position > 0:
            start = max(0, position - _CHUNK)
            file.seek(start)
            chunk = file.read(position - start)
            for place in range(len(chunk) - 1, -1, -1):
                if chunk[place] == ord("\n") and start + place + 1 < path.stat().st_size:
                    newlines += 1
                    if newlines == lines:
                        return start + place + 1
            position = start
    return 0
