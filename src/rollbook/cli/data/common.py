"""What the commands over datasets share: their arguments, a bar over bytes, and the report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from rollbook.cli.common import print_json
from rollbook.errors import UsageError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from rollbook.data.progress import Progress
    from rollbook.records.datasets import DataManifest

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


def reading(label: str, *, quiet: bool) -> AbstractContextManager[Progress]:
    """A bar over the bytes of each pass over the inputs."""
    from rollbook.cli.output import byte_progress

    return byte_progress(label, quiet=quiet)


def one_of(given: str, choices: Sequence[Choice], option: str) -> Choice:
    """The choice that was typed."""
    for choice in choices:
        if choice == given:
            return choice
    raise UsageError(f"{option} {given}: choose {' or '.join(choices)}")


# What to type where not one row is left: by the first of these counts that is not 0 ...
_DROPPED_ALL = {
    "below_min_reward": "lower --min-reward; `rollbook data stats` shows the rewards",
    "truncated": "every answer was cut off by a limit; --keep-truncated takes them all the same",
    "dropped": "loosen --where; `rollbook data stats` shows what the fields hold",
    "tasks_outside_band": "widen --band; `rollbook data profile` shows the pass rates",
    "without_reward": "no reward is a number; `rollbook data reverify` grades stored responses",
    "without_prompt": "the rows hold no responses_create_params.input",
    "nothing_answered": "no response.output holds text or a tool call",
}
# ... and, of pairs, by the first that is 0.
_PAIRLESS = (
    ("tasks_with_two_rewards", "no task has two rewards; collect with num_repeats=2 or more"),
    (
        "pairs_found",
        "no usable answers to one prompt lie that far apart; lower --min-gap, or see --keep-truncated",
    ),
)


def _warn_of_nothing(manifest: DataManifest) -> None:
    counts, rows = manifest.counts, manifest.rows_in
    hints = [text for name, text in _PAIRLESS if counts.get(name) == 0]
    hints += [text for name, text in _DROPPED_ALL.items() if counts.get(name)]
    if counts.get("without_reward") == rows:
        hints = [_DROPPED_ALL["without_reward"]]
    listed = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in counts.items() if count)
    why = "; ".join(filter(None, [listed, *hints[:1]])) if rows else ""
    of = f"not one of {rows} rows is left" if rows else "the inputs hold no rows"
    print(f"warning: {manifest.output} is empty: {of}{': ' + why if why else ''}", file=sys.stderr)


def print_manifest(manifest: DataManifest, as_json: bool, *, lines: Sequence[str] = ()) -> None:
    """What was done, for a person: rows in and out, every count, then the command's own lines."""
    from rollbook.cli.output import printable

    if manifest.output is not None and not manifest.rows_out:
        _warn_of_nothing(manifest)
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
    for path, why in manifest.left_out.items():
        print(printable(f"  skipped {path}: {why}"))
    for line in lines:
        print(printable(line))
