"""The tasks of a run: those it trains on, and those of its evaluations, which it never trains on."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from heapq import nlargest
from typing import Any, NamedTuple

from rollbook.envs.source import EnvironmentSource
from rollbook.errors import UsageError
from rollbook.records.identity import derive_seed, task_digest
from rollbook.records.plain import encode
from rollbook.rl.settings import OUR_KEYS, EnvironmentSettings, EvalSettings, RlSettings
from rollbook.rollouts.types import EnvironmentProtocol, Task
from rollbook.runs.random_state import seed_generators

# How many tasks an environment that makes its own is asked for.
GENERATED_TASKS = 4096
_SHOWN = 5


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

    def longest(self, count: int) -> list[Task]:
        """The tasks whose prompts have the most bytes."""
        numbers = nlargest(count, range(len(self)), key=lambda number: _bytes_of(self.task(number)))
        return [self.task(number) for number in numbers]

    @property
    def most_turns(self) -> int:
        """Replies of an episode, at most."""
        return min(self.settings.max_turns, self.source.kind.most_turns or self.settings.max_turns)

    @property
    def max_tokens(self) -> int:
        """Tokens of a reply, at most."""
        return int(self._params["max_output_tokens"])

    @property
    def make(self) -> Callable[[], EnvironmentProtocol]:
        return self.source.make

    def leave_out(self, held_out: Sequence[TaskPool]) -> int:
        """Drop the tasks that are in one of these pools, too; returns how many.

        What the policy is shown tells that, wherever it comes from. An id does where both are of one
        environment or one file: elsewhere others may have counted from 1 as well.
        """
        names: set[str] = set()
        for other in held_out:
            has_same_ids = self._has_ids_of(other)
            for number in range(len(other)):
                names |= _names_of(other.task(number), with_id=has_same_ids)
        if not names:
            return 0
        return self._keep([place for place in self._chosen if names.isdisjoint(_names_of(self._task(place)))])

    def _has_ids_of(self, other: TaskPool) -> bool:
        mine, others = self.source.rows, other.source.rows
        one_file = mine is not None and others is not None and mine.path.resolve() == others.path.resolve()
        return one_file or self.settings.label == other.settings.label

    def leave_out_doubles(self) -> int:
        """Drop every task that an earlier one is equal to, by what they show; returns how many."""
        kept: list[int] = []
        seen: set[str] = set()
        for place in self._chosen:
            if seen.isdisjoint(own := _names_of(self._task(place), with_id=False)):
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


class Pools(NamedTuple):
    training: list[TaskPool]  # in the order of `environments`
    held_out: dict[str, TaskPool]  # by the name of the eval

    @property
    def all(self) -> list[TaskPool]:
        return [*self.training, *self.held_out.values()]

    @property
    def sources(self) -> list[EnvironmentSource]:
        """Each environment once; an eval can have the one of a training pool."""
        return list({id(pool.source): pool.source for pool in self.all}.values())


def read_pools(settings: RlSettings, log: Callable[[str], None]) -> Pools:
    """The tasks, before anything that takes long; `log` is told how many there are and what was left out."""
    seed_generators(settings.seed)  # which code of the user may ask
    pools = [_training_pool(settings, environment) for environment in settings.environments]
    held_out = {evaluation.name: _held_out_pool(settings, evaluation, pools) for evaluation in settings.evals}
    _log_shared_ids([*pools, *held_out.values()], log)
    for name, other in held_out.items():
        if doubles := other.leave_out_doubles():
            log(f"eval {name}: {len(other)} tasks; {doubles} more are equal to one of them and left out")
    for pool in pools:
        held = pool.leave_out(list(held_out.values()))
        log(_described(pool, held))
        if not len(pool):
            raise UsageError(
                f"environment {pool.settings.label!r} has no task left to train on: all {held} have the "
                "prompt or the id of a task that is held out for an eval; lower evals.tasks, or give others"
            )
    return Pools(pools, held_out)


def _log_shared_ids(pools: Sequence[TaskPool], log: Callable[[str], None]) -> None:
    """Tell of files in which one id is that of several tasks: those are drawn like any others."""
    files = {rows.path: rows.sharing for pool in pools if (rows := pool.source.rows) is not None}
    for path, sharing in files.items():
        if sharing:
            some = f"{', '.join(sharing[:_SHOWN])}{', ...' if len(sharing) > _SHOWN else ''}"
            log(
                f"{len(sharing)} tasks of {path} have the id of an earlier row that is another task; queries "
                f"show them as {some}"
            )


def _described(pool: TaskPool, held: int) -> str:
    """How many tasks there are to train on, and why no other number."""
    text = f"environment {pool.settings.label}: {len(pool):,} tasks"
    if pool.source.rows is None and pool.settings.tasks is None:
        text += f" (it was asked for {GENERATED_TASKS:,}; `tasks` sets another number)"
    for assumed in sorted(pool.source.rows.assumed) if pool.source.rows is not None else ():
        text += f"; {assumed} (columns: {{prompt: NAME, answer: NAME}} names others)"
    return text + (f"; {held:,} more are held out for evals" if held else "")


def _training_pool(settings: RlSettings, environment: EnvironmentSettings) -> TaskPool:
    place = f"environments[{settings.environments.index(environment)}]"
    file = environment.tasks if isinstance(environment.tasks, str) else None
    source = _open(environment, file, place, f"{place}.tasks")
    rows: Sequence[Mapping[str, Any]] | None = source.rows
    if rows is None:
        if not source.makes_tasks:
            raise UsageError(
                f"{place}.tasks: {environment.name} makes no tasks of its own; write tasks: FILE.jsonl, with "
                "one on each line"
            )
        count = environment.tasks if isinstance(environment.tasks, int) else GENERATED_TASKS
        rows = list(source.tasks(count, derive_seed(settings.seed, "tasks", environment.label)))
    return TaskPool(environment, source, rows, sampling_params(settings))


def _held_out_pool(settings: RlSettings, evaluation: EvalSettings, pools: list[TaskPool]) -> TaskPool:
    place = f"evals[{settings.evals.index(evaluation)}]"
    pool = next(pool for pool in pools if pool.settings.label == evaluation.environment)
    source = pool.source
    seed = derive_seed(settings.seed, "eval", evaluation.name)
    rows: Sequence[Mapping[str, Any]] | None
    if isinstance(evaluation.tasks, str):
        source = _open(pool.settings, evaluation.tasks, place, f"{place}.tasks")
        rows = source.rows
    else:
        if source.rows is not None and evaluation.tasks >= len(source.rows):
            raise UsageError(
                f"{place}.tasks: {evaluation.name!r} holds out {evaluation.tasks} tasks, but "
                f"{evaluation.environment!r} has {len(source.rows)} in all; lower {place}.tasks"
            )
        rows = list(source.tasks(evaluation.tasks, seed))
    return TaskPool(pool.settings, source, rows or [], sampling_params(settings, evaluation))


def _open(
    environment: EnvironmentSettings, file: str | None, place: str, place_of_tasks: str
) -> EnvironmentSource:
    """The environment; what is wrong with it is said with its place in the config."""
    given: dict[str, Any] = {"name": environment.name, "as": environment.label, **environment.settings}
    if file is not None:
        given["tasks"] = file
    if environment.system is not None:
        given["system"] = environment.system
    try:
        return EnvironmentSource(given).check()
    except UsageError as error:
        for key in environment.settings:
            near = get_close_matches(key, OUR_KEYS, n=1, cutoff=0.75)
            if near and f"unknown key 'env.{key}'" in str(error):
                raise UsageError(f"unknown key '{place}.{key}'; did you mean {near[0]!r}?") from error
        text = str(error).replace("env.tasks", place_of_tasks)
        raise UsageError(_OF_ENV.sub(place, text)) from error


# Environments call the block of their settings `env`, as a collection's config does.
_OF_ENV = re.compile(r"(?<![\w./-])env(?= '|\.(?!py\b))")


def sampling_params(settings: RlSettings, evaluation: EvalSettings | None = None) -> dict[str, Any]:
    """How replies are sampled, under the names that rows use; those of a row itself do not count here."""
    sampler = settings.sampler
    temperature = sampler.temperature if evaluation is None else evaluation.temperature
    most = (evaluation.max_tokens if evaluation is not None else None) or sampler.max_tokens
    return {"temperature": temperature, "max_output_tokens": most}


def _bytes_of(task: Task) -> int:
    return len(encode([task.messages, task.tools]))


def _names_of(task: Task, *, with_id: bool = True) -> set[str]:
    digest = task_digest(task.messages, task.tools)
    return {f"id:{task.id}", digest} if with_id else {digest}
