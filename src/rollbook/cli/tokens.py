"""`rollbook tokens RUN`: what the loss did, token by token."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollbook.cli.common import ARTIFACTS, Artifacts, AsJson, print_json
from rollbook.errors import UsageError

if TYPE_CHECKING:
    from rollbook.records.token_places import TokenSource
    from rollbook.tokens.totals import Band

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def tokens(
    ref: Annotated[
        str, typer.Argument(help="a run, a directory with token_exports/, or one file of an export")
    ] = "latest",
    iteration: Annotated[
        int | None, typer.Option(min=0, help="only this iteration (or step of a fine-tuning)")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="rows of each table")] = 10,
    band: Annotated[
        str, typer.Option(help="count the tokens with an importance ratio outside LOW,HIGH")
    ] = "0.9,1.1",
    what_if: Annotated[
        list[str] | None,
        typer.Option("--what-if", help="masks of other thresholds, as clip_high=0.4; repeatable"),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(
            help="show one trajectory: ITERATION/GROUP/TRAJECTORY, as 398/7/3, with its part as 398/7/3/1, "
            "with a token as 398/7/3:46"
        ),
    ] = None,
    optim_step: Annotated[
        int | None,
        typer.Option(min=0, help="with --at: as this optimiser step of the iteration saw it, not the first"),
    ] = None,
    artifacts: Artifacts = ARTIFACTS,
    as_json: AsJson = False,
) -> None:
    """Say which tokens the loss left out, and where trainer and sampler disagree."""
    source = _source(ref, artifacts)
    if at is not None:
        if iteration is not None or what_if:
            raise UsageError(
                "--at names the iteration itself, and shows what the loss did; leave the rest out"
            )
        _show_one(source, at, optim_step, top, as_json)
        return
    if optim_step is not None:
        raise UsageError("--optim-step goes with --at; without it the tables have all optimiser steps")
    from rollbook.tokens.report import token_report

    report = token_report(source, iteration=iteration, most=top, band=_band(band), what_if=what_if or ())
    if as_json:
        print_json(report)
        return
    from rollbook.cli.token_tables import print_report

    print_report(report, top)


def _source(ref: str, artifacts: Path) -> TokenSource:
    from rollbook.records.token_places import token_source
    from rollbook.runs.references import find

    found = find(ref, artifacts)
    return token_source(found.path if found.path.is_file() else found.run_directory)


def _band(words: str) -> Band:
    from rollbook.tokens.totals import Band

    try:
        low, high = map(float, words.split(","))
    except ValueError:
        raise UsageError(f"--band {words}: write two numbers, such as 0.9,1.1") from None
    if not 0 <= low <= high:
        raise UsageError(f"--band {words}: the first number must be 0 or more, the second not smaller")
    return Band(low, high)


def _show_one(source: TokenSource, at: str, optim_step: int | None, top: int, as_json: bool) -> None:
    from rollbook.tokens.one_sequence import find_sequences, parse_place, rows_of

    place = parse_place(at)
    found = find_sequences(source, place, optim_step)
    if as_json:
        from rollbook.tokens.one_sequence import keys_of

        print_json(
            [{**keys_of(sequence), "tokens": rows_of(sequence, place.token)} for sequence in found.sequences]
        )
        return
    from rollbook.cli.token_sequence import print_sequence

    for sequence in found.sequences:
        print_sequence(sequence, found.steps, top, place.token)
