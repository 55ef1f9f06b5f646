"""The keys that docs/metrics.md promises."""

from __future__ import annotations

import re

from helpers.places import REPOSITORY


def documented_keys() -> set[str]:
    """The first cells of the tables of docs/metrics.md; a name alone continues the one before it."""
    keys: list[str] = []
    text = (REPOSITORY / "docs/metrics.md").read_text()
    for cell in re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE):
        before = ""
        for name in re.findall(r"`([^`]+)`", cell):
            if name.startswith("_"):
                name = before[: before.rindex(name.rpartition("_")[0])] + name
            elif "/" not in name and "/" in before:
                name = f"{before.rpartition('/')[0]}/{name}"
            before = name
            keys.append(name)
    times = re.findall(r"`(time/\w+|tokens_per_second)`", text)
    return {key for key in [*keys, *times] if "<" not in key}
