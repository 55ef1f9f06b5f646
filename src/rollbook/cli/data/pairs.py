"""`rollbook data pairs`: preference pairs within each task."""

from __future__ import annotations

from typing import Annotated

import typer

from rollbook.cli.common import AsJson, number
from rollbook.cli.data.common import (
    InputFiles,
    KeepTruncated,
    Output,
    Overwrite,
    one_of,
    print_manifest,
    reading,
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def pairs(
    inputs: InputFiles,
    output: Output,
    min_gap: Annotated[float, typer.Option(min=0, help="the least difference in reward")] = 0.0,
    per_task: Annotated[int, typer.Option(min=1, help="the most pairs of one task")] = 1,
    as_format: Annotated[str, typer.Option("--format", help="trl or llamafactory")] = "trl",
    keep_truncated: KeepTruncated = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """A better and a worse answer to the same prompt, for DPO and its kin."""
    from rollbook.data.pairs import pairs as make_pairs

    with reading("pairs", quiet=as_json) as progress:
        manifest = make_pairs(
            inputs,
            output,
            min_gap=min_gap,
            per_task=per_task,
            as_format=one_of(as_format, ("trl", "llamafactory"), "--format"),
            keep_truncated=keep_truncated,
            overwrite=overwrite,
            progress=progress,
        )
    gaps = manifest.details
    width = f"{number(gaps['gap_min'])} to {number(gaps['gap_max'])}"
    print_manifest(manifest, as_json, lines=[f"  gap in reward: mean {number(gaps['gap_mean'])}, {width}"])
