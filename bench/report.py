"""Keeps `bench/RESULTS.md`: one section a benchmark, replaced by each run, the others left as they are.

A section lies between `<!-- NAME:begin -->` and `<!-- NAME:end -->`. Text outside of all sections belongs
to people and is never touched.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

RESULTS = Path(__file__).with_name("RESULTS.md")
_HEADING = (
    "# Benchmark results\n\nEach section is written by the script it names; see there for what is measured.\n"
)


def provenance(versions: dict[str, str], rounds: int) -> str:
    """When, on what, and with which versions the numbers below were measured."""
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    measured = "one round" if rounds == 1 else f"medians of {rounds} rounds"
    return f"{date} · Python {platform.python_version()} · {named} · {machine} · {measured}"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def replace_section(text: str, name: str, body: str) -> str:
    """`text` with the section `name` holding `body`; a section that is not there yet goes to the end."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    section = f"{begin}\n{body.strip()}\n{end}"
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if found_begin and found_end:
        return before + section + after
    if found_begin or end in text:
        raise ValueError(f"section {name!r} has only one of its two markers; repair it by hand")
    return f"{text.rstrip()}\n\n{section}\n"


def write_section(name: str, body: str, path: Path = RESULTS) -> None:
    text = path.read_text(encoding="utf-8") if path.exists() else _HEADING
    path.write_text(replace_section(text, name, body), encoding="utf-8")
