"""What a run draws its tasks from and grades them with: noted when it begins, compared when it is resumed.

Another file of tasks would make another run of it, so that is refused. Grading that was mended may continue,
for a run that ended because its environment was broken could not go on otherwise; the log says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollbook.errors import UsageError
from rollbook.records.complete import file_facts
from rollbook.records.run_info import RunInfo, read_run_info, write_run_info
from rollbook.rl.tasks import TaskPool

_KEY = "environments"  # in run.json


def origins_of(pools: Sequence[TaskPool]) -> dict[str, Any]:
    """By the name of each environment: its code and settings, its file of tasks, how many it trains on."""
    found = {}
    for pool in pools:
        file = pool.source.rows.path if pool.source.rows is not None else None
        found[pool.settings.label] = {
            "source": pool.source.describe(),
            "file": None if file is None else msgspec.to_builtins(file_facts(file)),
            "tasks": len(pool),
        }
    return found


def note(path: Path, info: RunInfo, origins: Mapping[str, Any], *, at_its_beginning: bool) -> None:
    """Put them into run.json, where those that the run began with stay."""
    if at_its_beginning or _KEY not in info.extra:
        info.extra[_KEY] = origins
        write_run_info(path, info)


def changes(path: Path, origins: Mapping[str, Any]) -> list[str]:
    """What is not as it was when the run began, in sentences. Other tasks are refused."""
    said = []
    for label, before, now in _pairs(path, origins):
        if before["file"] != now["file"]:
            raise UsageError(
                f"cannot resume: the file with the tasks of environment {label!r} has changed since the run "
                "was started. Put it back, or choose another log_path"
            )
        if before["source"] != now["source"]:
            said.append(f"environment {label}: its code is not that with which the run was started")
        if before["tasks"] != now["tasks"]:
            said.append(
                f"environment {label}: {now['tasks']} tasks to train on instead of {before['tasks']}, for "
                "the evals hold out others; they come in another order from here"
            )
    return said


def _pairs(path: Path, origins: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    stored = read_run_info(path).extra.get(_KEY)
    if isinstance(stored, Mapping):
        for label, now in origins.items():
            if label in stored:
                yield label, stored[label], now
