"""`rollbook data rl`: task rows with their pass rates."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.common import AsJson
from rollbook.cli.data.common import InputFiles, Output, Overwrite, PassReward, print_manifest, reading

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def rl(
    inputs: InputFiles,
    output: Output,
    tasks: Annotated[
        Path | None,
        typer.Option(exists=True, help="the file the tasks came from; its rows are kept as they are"),
    ] = None,
    pass_reward: PassReward = 1.0,
    band: Annotated[str | None, typer.Option(help="only tasks with a pass rate in 0.1..0.9, say")] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """One row a task, with the pass rate its rollouts showed."""
    from rollbook.data.profile import Band
    from rollbook.data.rl import rl as make_rl

    with reading("rl", quiet=as_json) as progress:
        manifest = make_rl(
            inputs,
            output,
            tasks=tasks,
            pass_reward=pass_reward,
            band=Band.parse(band) if band else None,
            overwrite=overwrite,
            progress=progress,
        )
    print_manifest(manifest, as_json)
