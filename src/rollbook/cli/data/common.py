"""What the commands over datasets share: their arguments, a bar over bytes, and the report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from rollbook.cli.common import print_json
from rollbook.errors import UsageError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from rollbook.data.job import DataManifest
    from rollbook.data.rows import Advance

Choice = TypeVar("Choice", bound=str)

InputFiles = Annotated[list[str], typer.Argument(help="files, directories or 'globs'")]
Output = Annotated[
    Path, typer.Option("-o", "--output", help="the new dataset: .jsonl, .jsonl.zst or .parquet")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="replace an output that is there")]
PassReward = Annotated[float, typer.Option(help="a rollout passes with at least this reward")]
KeepTruncated = Annotated[
    bool, typer.Option("--keep-truncated", help="also answers that a limit of tokens or turns cut off")
]
Seed = Annotated[int, typer.Option(help="the same seed gives the same bytes")]


def reading(
    words: Sequence[str | Path], label: str, *, quiet: bool, passes: int = 1
) -> AbstractContextManager[Advance]:
    """A bar over the bytes of the inputs; `passes` is how often they are read."""
    from rollbook.cli.output import byte_progress
    from rollbook.data.inputs import find_inputs

    return byte_progress(total=find_inputs(words).bytes * passes, label=label, quiet=quiet)


def one_of(given: str, choices: Sequence[Choice], option: str) -> Choice:
    """The choice that was typed."""
    for choice in choices:
        if choice == given:
            return choice
    raise UsageError(f"{option} {given}: choose {' or '.join(choices)}")


def print_manifest(manifest: DataManifest, as_json: bool, *, lines: Sequence[str] = ()) -> None:
    """What was done, for a person: rows in and out, every count, then the command's own lines."""
    from rollbook.cli.output import printable

    if as_json:
        print_json(manifest)
        return
    files = f" of {len(manifest.inputs)} files" if len(manifest.inputs) > 1 else ""
    if manifest.output is None:
        print(printable(f"{manifest.rows_in} rows{files}"))
    else:
        print(printable(f"{manifest.output}: {manifest.rows_out} rows, from {manifest.rows_in}{files}"))
    if manifest.counts:
        counts = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in manifest.counts.items())
        print(printable(f"  {counts}"))
    if manifest.coverage:
        coverage = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in manifest.coverage.items())
        print(printable(f"  {coverage}"))
    for left in manifest.left_out:
        print(printable(f"  left out: {left} (stands beside a collection)"))
    for line in lines:
        print(printable(line))
