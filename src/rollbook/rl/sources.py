"""What a run is made of beside its settings: tasks, code and frozen weights, as each checkpoint notes them.

A run that is resumed with other tasks, or with adapters over another model, would not be the run that nobody
touched, so that is refused. Code may have been corrected because it failed: a change of it is named, in the
terminal and in the alerts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollbook.errors import UsageError
from rollbook.records.complete import file_facts
from rollbook.records.run_inputs import RunInput, file_input
from rollbook.rl.tasks import TaskPool
from rollbook.train.state import read_extra

_KEY = "rl"  # of training_state.json


class EnvironmentDigests(msgspec.Struct, omit_defaults=True):
    tasks: str | None = None  # of the file; None where the environment makes its tasks
    code: str | None = None  # of the user's; the version of ours


class Sources(msgspec.Struct, omit_defaults=True):
    environments: dict[str, EnvironmentDigests] = {}  # by label
    frozen_weights: str | None = None  # below adapters

    def as_extra(self) -> dict[str, Any]:
        """What a checkpoint holds of this beside weights, optimiser and random states."""
        return {_KEY: msgspec.to_builtins(self)}


def sources_of(pools: Sequence[TaskPool], frozen_weights: str | None) -> Sources:
    return Sources({pool.settings.label: _digests(pool) for pool in pools}, frozen_weights)


def inputs_of(pools: Sequence[TaskPool], held_out: Iterable[TaskPool]) -> list[RunInput]:
    """What run.json says of tasks and environments."""
    found = []
    for pool in pools:
        code = pool.source.describe()
        known = code.get("source_sha256") or f"version {code['version']}"
        found.append(RunInput(what="environment", path=pool.settings.name, code=str(known)))
        if pool.source.rows is not None:
            found.append(file_input("tasks", pool.source.rows.path))
    trained = [pool.source for pool in pools]
    others = [pool.source.rows for pool in held_out if pool.source not in trained]
    return found + [file_input("eval tasks", rows.path) for rows in others if rows is not None]


def changes_since(checkpoint: Path, now: Sources) -> list[str]:
    """The code that changed since a checkpoint was saved. Other tasks and other weights are refused."""
    before = msgspec.convert(read_extra(checkpoint).get(_KEY, {}), Sources)  # an older one notes nothing
    changed = []
    for label, noted in before.environments.items():
        found = now.environments.get(label, EnvironmentDigests())
        if noted.tasks != found.tasks:
            raise UsageError(_refusal(checkpoint, f"the tasks of environment {label!r}"))
        if noted.code != found.code:
            changed.append(f"the code of environment {label!r} changed since {checkpoint} was saved")
    if before.frozen_weights not in (None, now.frozen_weights):
        raise UsageError(_refusal(checkpoint, "the model below the adapters"))
    return changed


def _digests(pool: TaskPool) -> EnvironmentDigests:
    rows, described = pool.source.rows, pool.source.describe()
    code = described.get("source_sha256") or f"version {described['version']}"
    return EnvironmentDigests(None if rows is None else file_facts(rows.path).xxh3_128, code)


def _refusal(checkpoint: Path, what: str) -> str:
    return (
        f"cannot resume {checkpoint}: {what} changed since it was saved. Undo the change, or choose another "
        "log_path"
    )
