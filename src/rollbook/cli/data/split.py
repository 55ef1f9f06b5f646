"""`rollbook data split`: train, validation and so on, by task."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.common import AsJson
from rollbook.cli.data.common import Overwrite, Seed, print_manifest, reading

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def split(
    words: Annotated[list[str], typer.Argument(help="files, directories or 'globs', then train=0.9 val=0.1")],
    output: Annotated[Path, typer.Option("-o", "--output", help="the directory of train.jsonl, val.jsonl")],
    by: Annotated[
        str, typer.Option(help="what stays together: task, row (nothing does), or a field")
    ] = "task",
    seed: Seed = 0,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Part the rows by task, so that the repeats of a task are all in one part.

    Shares are exact over tasks, to the nearest whole one. A name may have an ending: train.jsonl.zst=0.9.
    """
    from rollbook.data.split import parse_shares
    from rollbook.data.split import split as make_split

    inputs, shares = parse_shares(words)
    with reading("split", quiet=as_json) as progress:
        manifest = make_split(
            inputs, shares, output, by=by, seed=seed, overwrite=overwrite, progress=progress
        )
    lines = [
        f"  {name}: " + ", ".join(f"{kind} {count}" for kind, count in part.items())
        for name, part in manifest.details.items()
    ]
    print_manifest(manifest, as_json, lines=lines)
