"""The snippets of the document that describes a run's files, cut out of it to be run verbatim."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from helpers.places import SHARED

DOCUMENT = SHARED / "source" / "rl-training-outputs.txt"

SNIPPETS = {  # first line, start of the last line
    "metrics": ("import pandas as pd", "df.plot("),
    "summaries": ("import json", "# - steps:"),
    "logtree": ("import json", "        print("),
}


def snippet(name: str) -> str:
    if not DOCUMENT.exists():
        pytest.skip("the document is not beside this checkout")
    lines = DOCUMENT.read_text().splitlines()
    heading = {
        "metrics": "metrics.jsonl",
        "summaries": "*_rollout_summaries.jsonl",
        "logtree": "*_logtree.json",
    }
    start = lines.index(heading[name])
    first, last = SNIPPETS[name]
    begin = lines.index(first, start)
    end = next(i for i in range(begin, len(lines)) if lines[i].startswith(last))
    return "\n".join(lines[begin : end + 1])


def run_in(directory: Path, code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=directory,
        capture_output=True,
        text=True,
        env={"MPLBACKEND": "Agg", "HOME": str(directory), "PATH": ""},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
