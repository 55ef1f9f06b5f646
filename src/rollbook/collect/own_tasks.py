"""Tasks of an environment's own making, written down so that a resumed collection has the same ones.

They go to `<stem>_tasks.jsonl` row by row, aside, and appear there whole: a million cost the memory of one.
More of them than last time are fine as long as they begin with those of last time.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rollbook.errors import UsageError
from rollbook.records.atomic import replacing
from rollbook.records.jsonl import read_lines
from rollbook.records.locks import FileLock
from rollbook.records.plain import encode


def count_tasks(path: Path) -> int:
    return sum(1 for _ in read_lines(path)) if path.exists() else 0


def write_tasks(path: Path, rows: Iterable[dict[str, Any]], *, go_on: bool) -> None:
    """Replace the tasks of `path`; with `go_on`, refuse rows that do not begin with those that are there."""
    with ExitStack() as opened:
        opened.callback(FileLock(path).release)
        old = opened.enter_context(path.open("rb")) if go_on else None
        new = opened.enter_context(replacing(path, is_locked=True))
        for row in rows:
            line = encode(row) + b"\n"
            if old is not None and old.readline() not in (line, b""):
                _refuse(path)
            new.write(line)
        if old is not None and old.readline():
            _refuse(path)


def refuse_other_tasks(shown: Path, path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Unless the file begins as these rows do: then a collection that was killed early has left it."""
    with path.open("rb") as file:
        first = file.readline()
    for row in rows:
        if first not in (encode(row) + b"\n", b""):
            there, aside = shlex.quote(str(shown)), shlex.quote(f"{shown}.old")
            raise UsageError(
                f"{shown} exists, and the environment's own tasks would be written over it; if it is the "
                f"input, add input_jsonl_fpath={there}; if not, type mv {there} {aside} and then the same "
                "command again"
            )
        return


def _refuse(path: Path) -> None:
    raise UsageError(
        f"{path}: the environment now makes other tasks than those collected; restore its settings and "
        "seed, or choose another output_jsonl_fpath"
    )
