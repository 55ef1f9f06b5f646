"""`rollbook data mix`: several sources in exact shares, sampled and shuffled."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from rollbook.cli.common import AsJson
from rollbook.cli.data.common import Output, Overwrite, Seed, print_manifest, reading
from rollbook.data.shares import Shortfall

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def mix(
    sources: Annotated[
        list[str], typer.Argument(metavar="NAME=PATH[,PATH...]:SHARE ...", help="the shares sum to 1")
    ],
    output: Output,
    total: Annotated[
        int | None, typer.Option(min=1, help="rows of the mix; by default as many as the shares allow")
    ] = None,
    seed: Seed = 0,
    shortfall: Annotated[
        Shortfall,
        typer.Option(help="where a source has too few rows: stop, take less of all, or repeat its rows"),
    ] = Shortfall.ERROR,
    source_key: Annotated[str, typer.Option(help="the field that names the source on every row")] = "source",
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Mix in exact shares: rollbook data mix good=a.jsonl:0.7 hard=b.jsonl:0.3 --total 10000 -o m.jsonl"""
    from rollbook.data.mix import mix as make_mix

    with reading("mix", quiet=as_json) as progress:
        manifest = make_mix(
            sources,
            output,
            total=total,
            seed=seed,
            shortfall=shortfall,
            source_key=source_key,
            overwrite=overwrite,
            progress=progress,
        )
    print_manifest(
        manifest, as_json, lines=[_line(source, manifest.rows_out) for source in manifest.details["sources"]]
    )


def _line(source: dict[str, Any], rows: int) -> str:
    share, asked = source["taken"] / max(1, rows), f"{source['share']:.4g}"
    real = f"{share:.4g}" if f"{share:.4g}" == asked else f"{share:.4g}, of {asked} asked for"
    none = "; too small a share for one row" if not source["taken"] else ""
    return f"  {source['name']}: {source['taken']} of {source['available']} ({real} of the mix{none})"
