"""The tasks of a run: those it trains on, and those of its evaluations, which it never trains on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollbook.envs.source import EnvironmentSource, open_environment
from rollbook.errors import UsageError
from rollbook.records.identity import derive_seed, task_digest
from rollbook.rl.settings import EnvironmentSettings, EvalSettings, RlSettings
from rollbook.rollouts.types import EnvironmentProtocol, Task

# How many tasks an environment that makes its own is asked for.
GENERATED_TASKS = 4096


class TaskPool:
    """Numbered tasks of one environment. Rows of a file stay in the file."""

    def __init__(
        self,
        settings: EnvironmentSettings,
        source: EnvironmentSource,
        rows: Sequence[Mapping[str, Any]],
        params: Mapping[str, Any],
    ) -> None:
        self.settings, self.source = settings, source
        self._rows, self._params = rows, dict(params)
        self._chosen: Sequence[int] = range(len(rows))

    def __len__(self) -> int:
        return len(self._chosen)

    def task(self, number: int) -> Task:
        return self._task(self._chosen[number])

    @property
    def make(self) -> Callable[[], EnvironmentProtocol]:
        return self.source.make

    def names(self) -> set[str]:
        """The id and the digest of every task: what tells that a task is here already."""
        return {name for number in range(len(self)) for name in _names_of(self.task(number))}

    def leave_out(self, names: set[str]) -> int:
        """Drop the tasks that have one of these names; returns how many."""
        return self._keep([place for place in self._chosen if names.isdisjoint(_names_of(self._task(place)))])

    def leave_out_doubles(self) -> int:
        """Drop every task that an earlier one is equal to; returns how many."""
        kept: list[int] = []
        seen: set[str] = set()
        for place in self._chosen:
            if seen.isdisjoint(own := _names_of(self._task(place))):
                kept.append(place)
                seen |= own
        return self._keep(kept)

    def _keep(self, places: list[int]) -> int:
        dropped = len(self._chosen) - len(places)
        if dropped:
            self._chosen = places
        return dropped

    def _task(self, place: int) -> Task:
        return self.source.task(self._rows[place], params=self._params)


def open_pools(
    settings: RlSettings, log: Callable[[str], None]
) -> tuple[list[TaskPool], dict[str, TaskPool]]:
    """The pools that are trained on, in the order of `environments`, and the held-out one of each eval.

    `log` is told what was left out of them.
    """
    pools = [_training_pool(settings, environment) for environment in settings.environments]
    held_out = {evaluation.name: _held_out_pool(settings, evaluation, pools) for evaluation in settings.evals}
    for name, other in held_out.items():
        if doubles := other.leave_out_doubles():
            log(f"eval {name}: {len(other)} tasks; {doubles} more are equal to one of them and left out")
    for pool in pools:
        evals = [held_out[e.name] for e in settings.evals if e.environment == pool.settings.label]
        if held := pool.leave_out(set().union(*(other.names() for other in evals))):
            log(f"environment {pool.settings.label}: {len(pool)} tasks; {held} more are held out for evals")
        if not len(pool):
            raise UsageError(
                f"environment {pool.settings.label!r} has no task left to train on: all of them are held out "
                "for evals; lower evals.tasks, or give more tasks"
            )
    return pools, held_out


def _training_pool(settings: RlSettings, environment: EnvironmentSettings) -> TaskPool:
    file = environment.tasks if isinstance(environment.tasks, str) else None
    source = _open(environment, file)
    rows: Sequence[Mapping[str, Any]] | None = source.rows
    if rows is None:
        count = environment.tasks if isinstance(environment.tasks, int) else GENERATED_TASKS
        rows = list(source.tasks(count, derive_seed(settings.seed, "tasks", environment.label)))
    return TaskPool(environment, source, rows, sampling_params(settings))


def _held_out_pool(settings: RlSettings, evaluation: EvalSettings, pools: list[TaskPool]) -> TaskPool:
    pool = next(pool for pool in pools if pool.settings.label == evaluation.environment)
    source = pool.source
    seed = derive_seed(settings.seed, "eval", evaluation.name)
    rows: Sequence[Mapping[str, Any]] | None
    if isinstance(evaluation.tasks, str):
        source = _open(pool.settings, evaluation.tasks)
        rows = source.rows
    else:
        if source.rows is not None and evaluation.tasks >= len(source.rows):
            raise UsageError(
                f"evals: {evaluation.name!r} holds out {evaluation.tasks} tasks, but "
                f"{evaluation.environment!r} has {len(source.rows)} in all; lower evals.tasks"
            )
        rows = list(source.tasks(evaluation.tasks, seed))
    return TaskPool(pool.settings, source, rows or [], sampling_params(settings, evaluation))


def _open(environment: EnvironmentSettings, file: str | None) -> EnvironmentSource:
    given: dict[str, Any] = {"name": environment.name, "as": environment.label, **environment.settings}
    if file is not None:
        given["tasks"] = file
    if environment.system is not None:
        given["system"] = environment.system
    return open_environment(given)


def sampling_params(settings: RlSettings, evaluation: EvalSettings | None = None) -> dict[str, Any]:
    """How replies are sampled, under the names that rows use; those of a row itself do not count here."""
    sampler = settings.sampler
    temperature = sampler.temperature if evaluation is None else evaluation.temperature
    most = (evaluation.max_tokens if evaluation is not None else None) or sampler.max_tokens
    return {"temperature": temperature, "max_output_tokens": most}


def _names_of(task: Task) -> set[str]:
    return {f"id:{task.id}", task_digest(task.messages, task.tools)}
