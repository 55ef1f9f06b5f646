"""`rollbook audit THING`: proof that every prompt, rollout, turn and token is in exactly one place.

Exit codes: 0 balanced, 3 something is missing or still running, 1 files disagree or cannot be read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollbook.cli.common import ARTIFACTS, Artifacts, AsJson, print_json
from rollbook.records.numbers import mean_text

if TYPE_CHECKING:
    from rollbook.audit.find import Thing
    from rollbook.audit.result import Audit

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_SAYS = {
    "balanced": "everything is in exactly one place",
    "running": "it is not at its end yet; what is complete balances",
    "incomplete": "something is missing; what is there agrees",
    "unbalanced": "the files do not agree",
    "unreadable": "something cannot be read",
}


@app.command()
def audit(
    thing: Annotated[
        str, typer.Argument(help="a run directory, the output of a collection, or a run of the history")
    ],
    input: Annotated[
        Path | None, typer.Option("--input", help="the file that was collected from, where it was moved")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="also read every checkpoint and compare its digests")
    ] = False,
    artifacts: Artifacts = ARTIFACTS,
    as_json: AsJson = False,
) -> None:
    """Prove that the books balance: every prompt, rollout, turn and token in one place, in every file."""
    from rollbook.cli.output import byte_progress

    found = _found(thing, artifacts)
    with byte_progress(f"audit of {thing}", quiet=as_json) as progress:
        progress.begin("its files", found.bytes())
        result = found.audit(input=input, verify=verify, advance=progress.advance)
    if as_json:
        print_json(result)
    else:
        _print(result)
    sys.exit(result.exit_code)


def _found(ref: str, artifacts: Path) -> Thing:
    """What a path means, or else a run of the history."""
    from rollbook.audit.find import find_thing
    from rollbook.runs.references import find

    is_file = "/" in ref or ref.endswith(".jsonl")  # which need not be there: its failures may
    return find_thing(Path(ref) if is_file else find(ref, artifacts).path)


def _print(audit: Audit) -> None:
    from rollbook.cli.output import printable

    done = f"{audit.done:,}" if audit.expected is None else f"{audit.done:,} of {audit.expected:,}"
    name = " ".join(filter(None, (audit.kind, audit.id)))
    print(printable(f"{audit.path}: {name}, {done} {audit.unit}, {audit.bytes_read / 1e6:,.1f} MB read"))
    _print_tables(audit)
    for line in _lines(audit):
        print(printable(line))
    print(f"\n{audit.verdict}: {_SAYS[audit.verdict]}")


def _print_tables(audit: Audit) -> None:
    if audit.places:
        header = ("split", "place", "prompts", "rollouts", "turns", "tokens", "tokens each", "reward")
        rows = [
            (
                place.split,
                place.name,
                f"{place.prompts:,}",
                f"{place.rollouts:,}",
                f"{place.turns:,}",
                f"{place.tokens:,}",
                _number(place.tokens_mean),
                mean_text(place.reward_mean, place.reward_std_error),
            )
            for place in audit.places
        ]
        _print_table(header, rows)
    if len(audit.ranks) > 1:
        _print_table(
            ("process", "micro-batches", "rows", "tokens", "exported"),
            [
                (
                    str(share.rank),
                    f"{share.micro_batches:,}",
                    f"{share.rows:,}",
                    f"{share.tokens:,}",
                    "" if share.exported is None else f"{share.exported:,}",
                )
                for share in audit.ranks
            ],
        )


def _print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.table import Table
    from rich.text import Text

    from rollbook.cli.output import console, printable

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in header:
        table.add_column(name, justify="left" if name in ("split", "place") else "right")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    print()
    console().print(table, soft_wrap=False)


def _lines(audit: Audit) -> Iterator[str]:
    for title, listed in (
        ("compared:", list(_checks(audit))),
        ("missing or left out, beside the others:", list(_comparisons(audit))),
        ("notes:", audit.notes),
        ("not answered by these files:", audit.unanswered),
        ("findings:", list(_findings(audit))),
    ):
        if listed:
            yield f"\n{title}"
            yield from (f"  {line}" for line in listed)


def _checks(audit: Audit) -> Iterator[str]:
    for check in audit.checks:
        unknown = f" ({check.unknown:,} more cannot be)" if check.unknown else ""
        yield f"{check.name}: {check.agreed:,} of {check.compared:,}{unknown}"


def _comparisons(audit: Audit) -> Iterator[str]:
    for one in audit.comparisons:
        numbers = []
        if one.tokens is not None:
            numbers.append(f"{_number(one.tokens)} tokens against {_number(one.other_tokens)}")
        if one.reward is not None:
            numbers.append(f"reward {_number(one.reward)} against {_number(one.other_reward)}")
        by = f", by {one.basis}: {', '.join(numbers)}" if numbers else ""
        yield f"{one.rollouts:,} {one.name}{by}; {one.says}"


def _findings(audit: Audit) -> Iterator[str]:
    for one in audit.findings:
        place = ":".join(str(part) for part in (one.file, one.line) if part is not None)
        yield f"{one.kind:<10} {place}: {one.what}" if place else f"{one.kind:<10} {one.what}"
        if one.more:
            yield f"{'':<10} and {one.more:,} more like it"
        if one.next:
            yield f"{'':<10} next: {one.next}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
