"""`rollbook stop NAME`: end a run politely."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from rollbook.cli.common import ARTIFACTS, Artifacts, AsJson, duration, print_json
from rollbook.errors import UsageError

if TYPE_CHECKING:
    from rollbook.runs.jobs.ledger import Ledger, RunRecord

LATEST = "latest"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def _running(ledger: Ledger, ref: str) -> str:
    """The running run that is meant: a name may have been used again since."""
    running = [record for record in ledger.records() if record.is_running and ref in (LATEST, record.name)]
    if len(running) > 1 and ref != LATEST:
        raise UsageError(
            f"several runs named {ref!r} are running: {', '.join(r.id for r in running)}; name one id"
        )
    return running[-1].id if running else ref


def _say_what_is_waited_for(record: RunRecord, timeout: float | None) -> None:
    """A collection may take its ten minutes of grace; whoever waits for it should know what for."""
    grace = timeout if timeout is not None else record.extra.get("grace_s")
    limit = f" for up to {duration(grace)}" if isinstance(grace, int | float) else ""
    what = "what is in flight" if record.kind == "collect" else "it"
    print(f"asking {record.id} to end, and waiting{limit} for {what} to finish", file=sys.stderr, flush=True)


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

    ledger = Ledger(artifacts)
    chosen = ledger.get(_running(ledger, ref))
    if chosen.is_running and not as_json:
        _say_what_is_waited_for(chosen, timeout)
    record = stop_run(ledger, chosen.id, timeout)
    if as_json:
        print_json(record)
    else:
        print(f"{record.id} is {record.status}")
