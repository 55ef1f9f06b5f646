"""`rollbook stop NAME`: end a run politely."""

from __future__ import annotations

from typing import Annotated

import typer

from rollbook.cli.common import ARTIFACTS, Artifacts, AsJson, print_json

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def stop(
    ref: Annotated[
        str, typer.Argument(help="the run: its id, the beginning of it, its name, or latest")
    ] = "latest",
    artifacts: Artifacts = ARTIFACTS,
    timeout: Annotated[float | None, typer.Option(help="seconds before it is killed")] = None,
    as_json: AsJson = False,
) -> None:
    """Ask a run to end, and kill it if it does not within its grace period."""
    from rollbook.runs.jobs.detach import stop as stop_run
    from rollbook.runs.jobs.ledger import Ledger

    record = stop_run(Ledger(artifacts), ref, timeout)
    if as_json:
        print_json(record)
    else:
        print(f"{record.id} is {record.status}")
