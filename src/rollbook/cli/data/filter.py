"""`rollbook data filter`: the rows for which a condition holds."""

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
    where: Annotated[
        str, typer.Option(help="SQL, such as 'reward >= 0.8 and turns < 4 and row.answer is not null'")
    ],
    output: Output,
    rejected: Rejected = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Keep the rows for which a condition holds: SQL over the columns of `rollouts` (see query --schema).

    Any other field is row.a.b[0], for texts row->>'$.a.b[0]'. A row that has no answer (a missing field, a
    text where a number should be) is not kept and is counted as unanswerable.
    """
    from rollbook.data.filter import filter_rows

    with reading("filter", quiet=as_json) as progress:
        manifest = filter_rows(
            inputs, output, where=where, rejected=rejected, overwrite=overwrite, progress=progress
        )
    places = manifest.details.get("first_places", [])
    print_manifest(manifest, as_json, lines=[f"  unanswerable: {place}" for place in places])
