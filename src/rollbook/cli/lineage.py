"""`rollbook lineage THING`: what it was made from, back to the first file, each link compared.

Exit codes: 0 no link is broken, 1 something was changed or is missing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollbook.cli.common import ARTIFACTS, Artifacts, AsJson, print_json

if TYPE_CHECKING:
    from rollbook.runs.lineage import Node

_LEFT_TO_JSON = ("started_at", "created_at", "rollbook")
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def lineage(
    thing: Annotated[
        str,
        typer.Argument(
            help="the path of a checkpoint, dataset, collection or run; or a run's name, name@step"
        ),
    ],
    artifacts: Artifacts = ARTIFACTS,
    as_json: AsJson = False,
) -> None:
    """Show what a checkpoint, a dataset or a collection was made from, and whether it is still the same."""
    from rollbook.cli.output import byte_progress, printable
    from rollbook.runs.lineage import BROKEN
    from rollbook.runs.lineage import lineage as trace
    from rollbook.runs.references import find

    path = find(thing, artifacts).path
    with byte_progress(f"lineage of {thing}", quiet=as_json) as progress:
        progress.begin("comparing digests", 0)
        node = trace(path, advance=progress.advance)
    if as_json:
        print_json(node)
    else:
        for line in tree_lines(node):
            print(printable(line))
        broken = [one for one in node.all() if one.status in BROKEN]
        print("\nevery link that can be compared is whole" if not broken else "\nbroken links:")
        for one in broken:
            print(printable(f"  {one.status}: {shown(one.path)}: {one.why}"))
    sys.exit(0 if node.is_whole else 1)


def tree_lines(node: Node, before: str = "", below: str = "") -> Iterator[str]:
    """A line for each thing; what it was made from is below it."""
    yield before + _line(node)
    for number, parent in enumerate(node.parents):
        is_last = number == len(node.parents) - 1
        yield from tree_lines(
            parent, f"{below}{'└─ ' if is_last else '├─ '}", f"{below}{'   ' if is_last else '│  '}"
        )


def _line(node: Node) -> str:
    given = {key: value for key, value in node.facts.items() if key not in _LEFT_TO_JSON}
    facts = ", ".join(f"{key} {_value(value)}" for key, value in given.items())
    verdict = ": ".join(filter(None, (str(node.status or ""), node.why)))
    return "  ".join(filter(None, (node.what, shown(node.path), f"({facts})" if facts else "", verdict)))


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key}={item}" for key, item in value.items() if item not in (None, False))
    return str(value)


def shown(path: str) -> str:
    """A path as seen from here, where it is below here."""
    place = Path(path)
    return str(place.relative_to(Path.cwd())) if place.is_relative_to(Path.cwd()) else path
