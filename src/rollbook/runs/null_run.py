"""What the other processes of a job use in place of `Run`: the same methods, and nothing is written.

    with open_writer("runs/a", rank=rank, kind="rl", resume=True) as run: ...

The first process writes the run. The others write only logs of their own, whose name says so
(`token_exports/rank_3.jsonl`), and must not open them before the first has opened the run: on resume it cuts
those logs back too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol, Self

from rollbook.records import logtree
from rollbook.records.complete import unfinished_path
from rollbook.records.iterations import IterationRecord
from rollbook.records.jsonl import JsonlWriter
from rollbook.records.layout import TRAIN, RunFiles
from rollbook.records.rollouts import Trajectory
from rollbook.runs.run import Run
from rollbook.runs.run_logs import checked_log


class LineWriter(Protocol):
    """A log: `JsonlWriter`, or one that forgets."""

    def append(self, data: bytes) -> int: ...

    def sync(self) -> int: ...

    def close(self) -> None: ...


def open_writer(log_path: str | Path, *, rank: int = 0, **settings: Any) -> Run | NullRun:
    """The run for the first process, which takes the settings of `Run`; a NullRun for the others."""
    return Run(log_path, **settings) if rank == 0 else NullRun(log_path, rank=rank)


class NullLog:
    def append(self, data: bytes) -> int:
        return 0

    def sync(self) -> int:
        return 0

    def close(self) -> None:
        """Nothing is open."""


class NullGroup:
    group_idx = 0
    task_id: str | None = None

    def add(self, trajectory: Trajectory, traj_idx: int | None = None) -> None:
        """Forget a trajectory."""

    def fail(
        self, error: BaseException | str, traj_idx: int | None = None, partial: Trajectory | None = None
    ) -> None:
        """Forget a failure."""

    @contextmanager
    def trajectory(self, traj_idx: int) -> Iterator[None]:
        yield


class NullRolloutLog:
    @contextmanager
    def group(self, group_idx: int | None = None, **_: Any) -> Iterator[NullGroup]:
        yield NullGroup()

    def metrics(self) -> dict[str, float]:
        return {}


class NullRun:
    id = ""
    attempt = 0
    resumed_from = None
    next_iteration = 0  # the first process knows, and tells the others

    def __init__(self, log_path: str | Path, *, rank: int) -> None:
        self.files = RunFiles(Path(log_path).expanduser().absolute())
        self.rank = rank
        self._logs: dict[str, JsonlWriter] = {}
        self._opened = ExitStack()

    def append_log(self, name: str) -> LineWriter:
        """A log that forgets; a real one where the name is that of this process."""
        path = checked_log(self.files, name)
        if not re.search(rf"rank_{self.rank}(?!\d)", name):
            return NullLog()
        if name not in self._logs:
            self._logs[name] = self._opened.enter_context(JsonlWriter(path, check=False))
        return self._logs[name]

    def log_lengths(self) -> dict[str, int]:
        """The lengths of this process's logs, for `log_lengths` of the first one's `checkpoint`."""
        self.sync()
        return {name: log.position for name, log in self._logs.items()}

    @contextmanager
    def checkpoint(self, name: str, **_: Any) -> Iterator[Path]:
        """Yields where the first process writes this checkpoint: ranks add their parts while it is open."""
        yield unfinished_path(self.files.checkpoint(name))

    def record_checkpoint(self, name: str, **_: Any) -> None:
        """Leave it to the first process."""

    def add_token_export(self, manifest: Path) -> None:
        """Leave it to the first process."""

    def finish_iteration(self, record: IterationRecord) -> None:
        """Leave it to the first process."""

    def restore_random_state(self) -> bool:
        return False

    def log_metrics(self, metrics: Mapping[str, Any], step: int) -> None:
        """Forget metrics."""

    def alert(self, title: str, text: str = "", **_: Any) -> None:
        """Forget an alert."""

    @contextmanager
    def rollouts(
        self, iteration: int, split: str = TRAIN, *, title: str | None = None, again: Any = None
    ) -> Iterator[NullRolloutLog]:
        yield NullRolloutLog()

    @contextmanager
    def report(self, iteration: int, split: str = TRAIN, *, title: str) -> Iterator[logtree.Trace]:
        yield logtree.Trace(title)

    def sync(self) -> None:
        for log in self._logs.values():
            log.sync()

    def close(self, outcome: str = "completed", error: str | None = None) -> None:
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
