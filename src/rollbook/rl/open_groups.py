"""The groups that are being played: each has a log from its first rollout to its last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from contextvars import copy_context
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from rollbook.records.logtree import Node
from rollbook.records.rollouts import Trajectory
from rollbook.rollouts.types import EnvironmentProtocol, Task


class GroupPlan(NamedTuple):
    """One task, to be played `size` times."""

    group_idx: int
    task: Task
    size: int
    seed: int  # the seeds of all its rollouts follow from it
    make: Callable[[], EnvironmentProtocol]
    max_turns: int
    tags: tuple[str, ...]


class GroupRecorder(Protocol):
    """Where the rollouts of a group go; `runs.rollout_log.GroupLog` is one."""

    @property
    def node(self) -> Node:
        """Where logtree calls of its environments go."""

    def add(self, trajectory: Trajectory, traj_idx: int | None = None) -> object: ...

    def fail(
        self, error: BaseException | str, traj_idx: int | None = None, partial: Trajectory | None = None
    ) -> object: ...


class Recorder(Protocol):
    """Where the rollouts of an iteration go; `runs.rollout_log.RolloutLog` is one."""

    def group(
        self,
        group_idx: int | None = None,
        *,
        task_id: str | None = None,
        tags: Sequence[str] = (),
        sampling_client_step: int | None = None,
        size: int | None = None,
    ) -> AbstractContextManager[GroupRecorder]: ...


class OpenGroups:
    """An error that leaves the block closes the groups that are open; the others have not begun, or are
    done."""

    def __init__(self, log: Recorder, version: int) -> None:
        self._log, self._version = log, version
        self._open: dict[int, _OpenGroup] = {}

    def begin(self, plan: GroupPlan) -> None:
        block = self._log.group(
            plan.group_idx,
            task_id=plan.task.id,
            tags=plan.tags,
            sampling_client_step=self._version,
            size=plan.size,
        )
        self._open[plan.group_idx] = _OpenGroup(block, plan.size)

    def recorder(self, group_idx: int) -> GroupRecorder:
        return self._open[group_idx].recorder

    def end_rollout(self, group_idx: int) -> None:
        """One of its rollouts is recorded."""
        group = self._open[group_idx]
        group.left -= 1
        if not group.left:
            del self._open[group_idx]
            group.close(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        closing = ExitStack()  # closes each of them, though another one cannot be closed
        for group in self._open.values():
            closing.push(group.close)
        closing.__exit__(kind, error, trace)


class _OpenGroup:
    """A block that may end before another one that began later: each has a context of its own."""

    def __init__(self, block: AbstractContextManager[GroupRecorder], size: int) -> None:
        self._block, self._context = block, copy_context()
        self.recorder = self._context.run(block.__enter__)
        self.left = size

    def close(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._context.run(self._block.__exit__, kind, error, trace)
