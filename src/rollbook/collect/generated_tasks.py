"""Tasks that an environment makes itself, written down so that a resumed collection has the same ones.

They go to `<stem>_tasks.ndjson` row by row, aside, and appear there whole: a million cost the memory of one.
More of them than last time are fine as long as they begin with those of last time.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rollbook.collect.files import CollectionFiles
from rollbook.collect.settings import CollectSettings
from rollbook.envs.agents import make_tasks
from rollbook.errors import UsageError
from rollbook.records.atomic import replacing
from rollbook.records.jsonl import read_lines
from rollbook.records.plain import encode


def generate_tasks(
    settings: CollectSettings, env: Mapping[str, Any], files: CollectionFiles, aside: Path | None = None
) -> Path:
    """The file with the environment's tasks, made if need be: in their place, or in the file `aside`.

    Whoever calls holds the lock of the output, unless it is made aside.
    """
    if settings.limit is None:
        raise UsageError(
            "input_jsonl_fpath is missing; add it, or limit=N for tasks of the environment's own"
        )
    old = files.tasks if files.have_results and files.tasks.exists() else None
    if old is not None and sum(1 for _ in read_lines(old)) >= settings.limit:
        return old
    if files.tasks.exists() and not files.manifest.exists():
        _refuse_to_overwrite(files, make_tasks(env, 1, settings.seed))
    path = aside or files.tasks
    write_tasks(path, make_tasks(env, settings.limit, settings.seed), old)
    return path


def write_tasks(path: Path, rows: Iterable[dict[str, Any]], old: Path | None = None) -> None:
    """Write the rows to `path`; refuse rows that do not begin with those of `old`."""
    with ExitStack() as opened:
        before = opened.enter_context(old.open("rb")) if old else None
        new = opened.enter_context(replacing(path, is_locked=True))
        for row in rows:
            line = encode(row) + b"\n"
            if before is not None and before.readline() not in (line, b""):
                _refuse(path)
            new.write(line)
        if before is not None and before.readline():
            _refuse(path)


def _refuse_to_overwrite(files: CollectionFiles, rows: Iterable[dict[str, Any]]) -> None:
    """A file that was there before any collection is somebody's, unless it begins as these rows do: then a
    collection that was killed early has left it."""
    with files.tasks.open("rb") as file:
        first = file.readline()
    if first in (b"", *(encode(row) + b"\n" for row in rows)):
        return
    there, aside = shlex.quote(str(files.shown_input)), shlex.quote(f"{files.shown_input}.old")
    raise UsageError(
        f"{files.shown_input} exists, and the environment's own tasks would overwrite it; if it is the "
        f"input, add input_jsonl_fpath={there}; if not, type mv {there} {aside} and then the same command"
    )


def _refuse(path: Path) -> None:
    raise UsageError(
        f"{path}: the environment now makes other tasks than those collected; restore its settings and "
        "seed, or choose another output_jsonl_fpath"
    )
