"""Tasks of an environment's own making, written down so that a resumed collection has the same ones.

They go to `<stem>_tasks.jsonl` row by row, aside, and appear there whole: a million cost the memory of one.
More of them than last time are fine as long as they begin with those of last time.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rollbook.errors import UsageError, WriteError
from rollbook.records.atomic import fsync_directory
from rollbook.records.jsonl import read_lines
from rollbook.records.locks import FileLock
from rollbook.records.plain import encode


def count_tasks(path: Path) -> int:
    return sum(1 for _ in read_lines(path)) if path.exists() else 0


def write_tasks(path: Path, rows: Iterable[dict[str, Any]], *, go_on: bool) -> None:
    """Replace the tasks of `path`; with `go_on`, refuse rows that do not begin with those that are there."""
    aside = path.with_name(f".{path.name}.new")  # one name, so that a kill leaves at most one behind
    with ExitStack() as opened:
        opened.callback(FileLock(path).release)
        opened.callback(aside.unlink, missing_ok=True)
        try:
            old = opened.enter_context(path.open("rb")) if go_on else None
            with aside.open("wb") as new:
                for row in rows:
                    line = encode(row) + b"\n"
                    if old is not None and old.readline() not in (line, b""):
                        _refuse(path)
                    new.write(line)
                if old is not None and old.readline():
                    _refuse(path)
                new.flush()
                os.fsync(new.fileno())
            aside.replace(path)
        except OSError as error:
            raise WriteError(f"{path}: not written ({error.strerror or error})") from error
        fsync_directory(path.parent)


def _refuse(path: Path) -> None:
    raise UsageError(
        f"{path}: the environment now makes other tasks than those collected; restore its settings and "
        "seed, or choose another output_jsonl_fpath"
    )
