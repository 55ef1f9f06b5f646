"""`rollbook data merge`: any number of files into one, checked."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from rollbook.cli.common import AsJson
from rollbook.cli.data.common import InputFiles, Output, Overwrite, print_manifest, reading

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
INCOMPLETE = 3


@app.command()
def merge(
    inputs: InputFiles,
    output: Output,
    ordered: Annotated[bool, typer.Option("--ordered", help="by task and repeat, not as they come")] = False,
    duplicates: Annotated[
        Literal["error", "first"],
        typer.Option(help="a key that stands twice: stop, or keep the first row of it"),
    ] = "error",
    tasks: Annotated[
        Path | None, typer.Option(help="what was to be collected: for the coverage, and for --ordered")
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(help="how often each of --tasks was to be collected; by default as the manifests say"),
    ] = None,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="exit with 0 even if rollouts are missing")
    ] = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Merge files and check the whole: rollbook data merge 'rollouts_chunk_*.jsonl' -o rollouts.jsonl"""
    from rollbook.data.merge import Duplicates
    from rollbook.data.merge import merge as merge_files

    with reading("merging", quiet=as_json) as progress:
        manifest = merge_files(
            inputs,
            output,
            ordered=ordered,
            duplicates=Duplicates(duplicates),
            tasks=tasks,
            repeats=repeats,
            overwrite=overwrite,
            progress=progress,
        )
    print_manifest(manifest, as_json, lines=_remarks(manifest.counts, manifest.coverage))
    if manifest.coverage.get("missing") and not allow_missing:
        sys.exit(INCOMPLETE)


def _remarks(counts: dict[str, int], coverage: dict[str, int]) -> list[str]:
    lines = []
    if not coverage:
        lines.append("  coverage unknown: not every file has a manifest; --tasks FILE says what to expect")
    if counts.get("sharing_an_index"):
        lines.append(
            "  different tasks share an index, as chunks counted from 0 do; --tasks FILE orders them"
        )
    return lines
