"""`rollbook plot RUN`: the curves of a run as a picture, at any time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.common import ARTIFACTS, Artifacts, AsJson, print_json
from rollbook.errors import UsageError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def plot(
    ref: Annotated[str, typer.Argument(help="a run of the history, or a run directory")] = "latest",
    metric: Annotated[
        list[str] | None, typer.Option("-m", "--metric", help="what to draw; repeatable")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="the picture; .png, .svg or .pdf")
    ] = None,
    artifacts: Artifacts = ARTIFACTS,
    as_json: AsJson = False,
) -> None:
    """Draw the curves of a run, finished, running or crashed."""
    from rollbook.runs.jobs.finish import output_dir_of
    from rollbook.runs.jobs.ledger import Ledger
    from rollbook.runs.plots import curves_of, draw

    if Path(ref).is_dir():
        directory, title = Path(ref), Path(ref).name
    else:
        ledger = Ledger(artifacts)
        record = ledger.get(ref)
        found = output_dir_of(record, ledger)
        if found is None:
            raise UsageError(f"{record.id} did not say where it writes; give a directory: rollbook plot DIR")
        directory, title = found, f"{record.name} ({record.status})"
    curves = curves_of(directory, metric or ())
    picture = output or directory / (
        "training_loss.png" if (directory / "trainer_log.jsonl").exists() else "curves.png"
    )
    draw(curves, picture, title)
    if as_json:
        print_json({"picture": picture, "curves": {curve.name: len(curve.steps) for curve in curves}})
    else:
        print(f"{picture}: {', '.join(f'{curve.name} ({len(curve.steps)} points)' for curve in curves)}")
