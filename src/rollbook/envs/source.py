"""`open_environment`: an environment from its settings or its class, ready to give tasks and episodes.

    source = open_environment({"name": "arithmetic", "digits": 1})            # built in
    source = open_environment({"name": "dataset", "as": "sums", "tasks": "train.jsonl", "grader": "math",
                               "system": "Answer with one number."})
    source = open_environment({"name": "env.py:Mine"}), open_environment(Mine), open_environment(source)

    source.name                     # `as`, else the name
    source.weight                   # 1.0 unless the settings say otherwise
    source.describe()               # settings and code (a version, or a digest) that decide the reward
    source.rows                     # the rows of `tasks:` as a sequence; None where it makes its own
    source.tasks(count, seed)       # rows: of its own making, or of the file in an order by the seed
    source.task(row, seed=...)      # the Task that an episode starts from
    await play(source.make(), policy, task)
    await source.close()            # what the episodes shared

The keys `as`, `weight`, `tasks` and `system` are the same for all environments; everything else is a setting
of the environment's own. `system` is put before the messages of rows that have no system message.
"""

from __future__ import annotations

import logging
import random
from array import array
from collections import Counter
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, overload

import msgspec
import xxhash

from rollbook.envs.base import Environment
from rollbook.envs.dataset_rows import read_dataset_row
from rollbook.envs.registry import check_settings, describe_code, environment_class, settings_of
from rollbook.errors import UsageError
from rollbook.policies.registry import refuse_secrets
from rollbook.records.columns import USUAL, Columns
from rollbook.records.identity import marked_id, own_id, task_digest, task_id
from rollbook.records.json_array import elements, is_array
from rollbook.records.jsonl import read_lines
from rollbook.rollouts.failures import error_with_place, is_cancellation
from rollbook.rollouts.types import Task
from rollbook.rollouts.user_code import as_written, blaming, qualified_name
from rollbook.runs.settings import typed

_NOT_SETTINGS = ("name", "as", "weight")
_FOR_ALL = ("tasks", "system", "columns")  # unless the environment has a setting of that name
# Settings of an endpoint (a judge) that say where and how fast, not what.
_OPERATIONAL = frozenset(
    {"base_url", "api_key_env", "headers", "connect_timeout_s", "total_timeout_s", "max_response_bytes"}
)
_SHOWN_PROBLEMS = 20
_OTHER_SHAPE = (KeyError, TypeError, ValueError, AttributeError, msgspec.MsgspecError)
_log = logging.getLogger("rollbook")


def open_environment(env: Mapping[str, Any] | type[Environment] | EnvironmentSource) -> EnvironmentSource:
    """Refuses wrong settings and bad rows with their places; makes what the episodes share."""
    if not isinstance(env, EnvironmentSource):
        env = EnvironmentSource({"name": env} if isinstance(env, type) else env)
    return env.open()


class EnvironmentSource:
    """One environment of a job: its tasks, and a new Environment for each episode."""

    def __init__(self, env: Mapping[str, Any]) -> None:
        refuse_secrets(env, "env")
        self._code = environment_name(env)
        self.kind = environment_class(self._code)
        self._label = as_written(self._code) if isinstance(self._code, str) else self.kind.__name__
        self.name = str(env.get("as") or self._label)
        self.weight = float(env.get("weight", 1.0))
        common = [key for key in _FOR_ALL if key not in settings_of(self.kind)]
        self._path: str | None = env.get("tasks") if "tasks" in common else None
        self._system: str | None = env.get("system") if "system" in common else None
        for key, value in (("tasks", self._path), ("system", self._system)):
            if not isinstance(value, str | None):
                raise UsageError(f"env.{key} is {value!r}; it must be text")
        named = env.get("columns") if "columns" in common else None
        self.columns = typed(named, Columns, "env.columns") if named else USUAL
        self.settings = {key: value for key, value in env.items() if key not in (*_NOT_SETTINGS, *common)}
        self._shared: dict[str, Any] | None = None

    def check(self) -> EnvironmentSource:
        """Refuse wrong settings and rows."""
        check_settings(self.kind, self.settings, self._label, (*_NOT_SETTINGS, *_FOR_ALL))
        self.rows  # noqa: B018 - which reads the file
        return self

    def open(self) -> EnvironmentSource:
        """Check the settings and the rows, and make what the episodes share."""
        if self._shared is None:
            self.check()
            with blaming(f"env {self._label!r}: its shared() failed:"):
                self._shared = self.kind.shared(**self.settings)
        return self

    @property
    def makes_tasks(self) -> bool:
        """Whether the environment has tasks of its own making."""
        return next(kind for kind in self.kind.__mro__ if "tasks" in vars(kind)) is not Environment

    @cached_property
    def rows(self) -> TaskFile | None:
        return None if self._path is None else TaskFile(Path(self._path), self)

    def describe(self) -> dict[str, Any]:
        """Everything that decides the reward of an answer; addresses and time limits do not."""
        system = {} if self._system is None else {"system": self._system}
        name = self._label if isinstance(self._code, str) else qualified_name(self._code)
        return {"name": name, **_without_operation(self.settings), **system} | describe_code(self._code)

    def tasks(self, count: int, seed: int = 0) -> Iterator[dict[str, Any]]:
        """Rows of tasks, the same for the same seed. A file starts again, in another order, at its end."""
        if self.rows is not None:
            return self._rows_by_seed(self.rows, count, seed)
        try:
            with blaming(f"env {self._label!r}: its tasks() failed:"):
                rows = islice(self.kind.tasks(count, seed, **self.settings), count)
        except UsageError as error:
            if isinstance(error.__cause__, NotImplementedError):
                raise UsageError(
                    f"env {self._label!r}: {error.__cause__} (input_jsonl_fpath=... of a collection, "
                    "env.tasks elsewhere)"
                ) from None
            raise
        return self._own_rows(rows)

    def task(
        self,
        row: Mapping[str, Any],
        *,
        repeat: int = 0,
        seed: int | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> Task:
        """A row in any of the usual shapes as a task; `params` win over the row's own."""
        found = read_dataset_row(row, self.columns)
        return self.with_system(
            Task(
                id=task_id(row if self.columns == USUAL else found.with_params),
                row=found.row,
                messages=found.messages,
                tools=found.tools,
                params={**found.params, **(params or {})},
                repeat=repeat,
                seed=seed,
            )
        )

    def with_system(self, task: Task) -> Task:
        if self._system is None or any(message.get("role") == "system" for message in task.messages):
            return task
        first = {"role": "system", "content": self._system}
        return msgspec.structs.replace(task, messages=[first, *task.messages])

    def make(self) -> Environment:
        if self._shared is None:
            self.open()
        return self.kind(**{**self.settings, **(self._shared or {})})

    async def close(self) -> None:
        """Close what the episodes shared."""
        shared, self._shared = self._shared, None
        for name, resource in (shared or {}).items():
            try:
                if (close := getattr(resource, "close", None)) is not None:
                    closing = close()
                    if isinstance(closing, Awaitable):
                        await closing
            except BaseException as error:  # the episodes are over, and the others want closing too
                if is_cancellation(error):
                    raise
                _log.warning("%s: closing %r: %s", self.kind.__name__, name, error_with_place(error))

    def _own_rows(self, rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        with blaming(f"env {self._label!r}: its tasks() failed:"):
            yield from rows

    def _rows_by_seed(self, rows: TaskFile, count: int, seed: int) -> Iterator[dict[str, Any]]:
        for given in range(count):
            epoch, place = divmod(given, len(rows))
            if place == 0:
                order = list(range(len(rows)))
                random.Random(f"{seed}-{epoch}").shuffle(order)
            row = rows[order[place]]
            yield row if self.columns == USUAL else read_dataset_row(row, self.columns).with_params


class TaskFile(Sequence[dict[str, Any]]):
    """The rows of a file, each checked once and read again when it is asked for."""

    def __init__(self, path: Path, source: EnvironmentSource) -> None:
        self.path = path.absolute()
        self.assumed: set[str] = set()  # what was taken for what in rows without parameters
        self._places = array("Q")
        problems, ids = [], array("Q")  # hashes of the ids that rows bring; 0 where one has none
        try:
            for where, start, end, data in _rows_of(self.path):
                try:
                    row = _decoded(data)
                    source.task(row)
                    self.assumed |= {read_dataset_row(row, source.columns).assumed or ""} - {""}
                    own = own_id(row)
                    ids.append(
                        0 if own is None else xxhash.xxh3_64_intdigest(own.encode(errors="surrogatepass"))
                    )
                except _OTHER_SHAPE as error:
                    problems.append(f"  {path}{where}: {error}")
                self._places.extend((start, end))
        except FileNotFoundError:
            where = "" if path.is_absolute() else f" in {Path.cwd()}"
            raise UsageError(f"env.tasks: there is no file {path}{where}") from None
        except OSError as error:
            raise UsageError(f"env.tasks: {path}: {error.strerror or error}") from None
        if problems or not self._places:
            shown = problems[:_SHOWN_PROBLEMS] or ["  it has no rows"]
            if len(problems) > _SHOWN_PROBLEMS:
                shown.append(f"  and {len(problems) - _SHOWN_PROBLEMS} more")
            raise UsageError("\n".join([f"env.tasks: {path} cannot be used:", *shown]))
        self.sharing = self._names_of_other_tasks(ids)

    def _names_of_other_tasks(self, ids: array[int]) -> list[str]:
        """What queries show the tasks as whose id an earlier row has that shows something else."""
        repeated = {name for name, count in Counter(ids).items() if count > 1 and name}
        first: dict[int, str | None] = {}
        names: dict[str, None] = {}
        for place, name in enumerate(ids):
            if name in repeated:
                row = self[place]
                digest = task_digest(row)
                if first.setdefault(name, digest) != digest:
                    names[marked_id(str(own_id(row)), digest)] = None
        return list(names)

    def __len__(self) -> int:
        return len(self._places) // 2

    @overload
    def __getitem__(self, place: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, place: slice) -> list[dict[str, Any]]: ...

    def __getitem__(self, place: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(place, slice):
            return [self[one] for one in range(len(self))[place]]
        place = range(len(self))[place]
        start, end = self._places[2 * place], self._places[2 * place + 1]
        with self.path.open("rb") as file:
            file.seek(start)
            return _decoded(file.read(end - start))


def environment_name(env: Mapping[str, Any]) -> str | type[Environment]:
    name = env.get("name")
    if not name or not isinstance(name, str | type):
        raise UsageError("env.name is missing; write env: {name: arithmetic}")
    return name


_decode = msgspec.json.Decoder(dict[str, Any]).decode  # keeps whole numbers past 64 bits


def _decoded(line: bytes) -> dict[str, Any]:
    row: dict[str, Any] = _decode(line)
    return row


def _rows_of(path: Path) -> Iterator[tuple[str, int, int, bytes]]:
    """Each row with its place: as people read it, and by its bytes."""
    if is_array(path):
        for element in elements(path):
            yield f": element {element.number}", element.start, element.end, element.line
        return
    for line in read_lines(path, accept_tail=True):
        if line.data.strip():
            yield f":{line.number}", line.start, line.end, line.data


def _without_operation(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without where an endpoint is and how long to wait for it."""
    kept: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and "base_url" in value:
            kept[key] = {name: item for name, item in value.items() if name not in _OPERATIONAL}
        else:
            kept[key] = value
    return kept
