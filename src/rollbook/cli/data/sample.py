"""`rollbook data sample`: a uniform sample of rows or of whole tasks."""

from __future__ import annotations

from typing import Annotated

import typer

from rollbook.cli.common import AsJson
from rollbook.cli.data.common import InputFiles, Output, Overwrite, Seed, print_manifest, reading

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def sample(
    inputs: InputFiles,
    output: Output,
    count: Annotated[int | None, typer.Option("-n", "--count", help="how many")] = None,
    fraction: Annotated[float | None, typer.Option(help="or which share of them, such as 0.1")] = None,
    by_task: Annotated[
        bool, typer.Option("--by-task", help="whole tasks with all their repeats; -n counts tasks")
    ] = False,
    shuffle: Annotated[bool, typer.Option("--shuffle", help="not in the order of the input")] = False,
    seed: Seed = 0,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Take a uniform sample without replacement: rollbook data sample rollouts.jsonl -n 1000 -o some.jsonl"""
    from rollbook.data.sample import sample as make_sample

    with reading("sampling", quiet=as_json) as progress:
        manifest = make_sample(
            inputs,
            output,
            count=count,
            fraction=fraction,
            by_task=by_task,
            shuffle=shuffle,
            seed=seed,
            overwrite=overwrite,
            progress=progress,
        )
    print_manifest(manifest, as_json)
