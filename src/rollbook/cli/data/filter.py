"""`rollbook data filter`: the rows for which an expression holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.common import AsJson
from rollbook.cli.data.common import InputFiles, Output, Overwrite, print_manifest, reading

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

Rejected = Annotated[Path | None, typer.Option(help="a file for the rows that are left out")]


@app.command()
def filter(
    inputs: InputFiles,
    where: Annotated[str, typer.Option(help="such as 'reward >= 0.8 and num_turns < 4'")],
    output: Output,
    rejected: Rejected = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Keep the rows for which a condition over their fields holds.

    Fields: a.b[0], row["odd name"]. Functions: len, lower, contains, startswith, matches, has, abs, min, max,
    and any(x.type == "function_call" for x in response.output). A row that lacks what is asked is not kept
    and is counted as unanswerable.
    """
    from rollbook.data.filter import filter_rows

    with reading(inputs, "filter", quiet=as_json) as advance:
        manifest = filter_rows(
            inputs, output, where=where, rejected=rejected, overwrite=overwrite, advance=advance
        )
    places = manifest.details.get("first_places", [])
    print_manifest(manifest, as_json, lines=[f"  unanswerable: {place}" for place in places])
