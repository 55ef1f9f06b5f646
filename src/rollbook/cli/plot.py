"""`rollbook plot RUN`: the curves of a run as a picture, at any time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.common import ARTIFACTS, Artifacts, AsJson, print_json

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
    from rollbook.records.layout import RunFiles
    from rollbook.runs.plots import curves_of, draw
    from rollbook.runs.references import find

    found = find(ref, artifacts)
    directory, record = found.run_directory, found.record
    title = f"{record.name} ({record.status})" if record is not None else directory.name
    curves = curves_of(directory, metric or ())
    is_ours = record is not None or RunFiles(directory).run.exists()
    picture = output or (directory if is_ours else Path()) / _name_of(directory, metric or [])
    draw(curves, picture, title)
    if as_json:
        print_json({"picture": picture, "curves": {curve.name: len(curve.steps) for curve in curves}})
    else:
        print(f"{picture}: {', '.join(f'{curve.name} ({len(curve.steps)} points)' for curve in curves)}")


def _name_of(directory: Path, metrics: list[str]) -> str:
    """Chosen curves get a picture of their own: training_loss.png may have been handed over."""
    from rollbook.records.layout import sanitize
    from rollbook.records.trainer_log import LOG, PICTURE

    if metrics:
        return f"{sanitize('_'.join(metrics))}.png"
    return PICTURE if (directory / LOG).exists() else "curves.png"
