"""`rollbook data dedup`: each row once, exactly or nearly."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.common import AsJson
from rollbook.cli.data.common import InputFiles, Output, Overwrite, print_manifest, reading

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def dedup(
    inputs: InputFiles,
    output: Output,
    on: Annotated[
        str | None, typer.Option(help="what to compare: task, prompt or a field; the whole row by default")
    ] = None,
    near: Annotated[
        float | None, typer.Option(help="also texts as similar as this, such as 0.8 (Jaccard, 5-word runs)")
    ] = None,
    rejected: Annotated[
        Path | None,
        typer.Option(help="a file for the repeated rows, each with the key of the row it repeats"),
    ] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Keep the first of equal, or with --near nearly equal, rows; keys, ids and times of collecting aside."""
    from rollbook.data.dedup import dedup as make_dedup

    with reading("dedup", quiet=as_json) as progress:
        manifest = make_dedup(
            inputs, output, on=on, near=near, rejected=rejected, overwrite=overwrite, progress=progress
        )
    details = manifest.details
    line = f"  {details['clusters']} rows have repeats; the most alike: {details['largest_cluster']} rows"
    print_manifest(manifest, as_json, lines=[line] if details["clusters"] else [])
