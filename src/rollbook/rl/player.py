"""Plays the groups of an iteration or an evaluation, all at once, and records each rollout when it ends.

The event loop lives in a thread of its own, so that the story of a run is plain calls. What comes out does
not depend on the order in which rollouts end: every seed follows from the run's seed, the iteration, the
task and the sample.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import TimeoutError as NotYet
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, NamedTuple, Protocol, Self

from rollbook.records.identity import derive_seed
from rollbook.records.rollouts import Trajectory
from rollbook.rl.groups import Group
from rollbook.rollouts.episode import play
from rollbook.rollouts.retry import RetrySettings
from rollbook.rollouts.runner import Done, GivenUp, Retry, run_all
from rollbook.rollouts.trajectory import trajectory_of
from rollbook.rollouts.types import EnvironmentProtocol, Episode, FailureKind, Policy, Task


class GroupPlan(NamedTuple):
    """One task, to be played `size` times."""

    group_idx: int
    task: Task
    size: int
    seed: int  # the seeds of all its rollouts follow from it
    make: Callable[[], EnvironmentProtocol]
    max_turns: int
    tags: tuple[str, ...]


class Rollout(NamedTuple):
    plan: GroupPlan
    traj_idx: int
    attempt: int = 0

    @property
    def name(self) -> str:
        return f"group {self.plan.group_idx}, rollout {self.traj_idx} ({self.plan.task.id})"


class Waiting(NamedTuple):
    """A rollout that has begun and not ended: what a stall report lists."""

    name: str
    seconds: float


class GroupRecorder(Protocol):
    """Where the rollouts of a group go; `runs.rollout_log.GroupLog` is one."""

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


class Played(NamedTuple):
    """The rollouts of every group, and how many attempts ran out of time or were made again."""

    groups: list[Group]
    timeouts: int
    retries: int


class Closes(Protocol):
    def close(self) -> Coroutine[Any, Any, None]: ...


class Player:
    def __init__(self, retry: RetrySettings, episode_timeout_s: float | None = None) -> None:
        self._retry = retry
        self._timeout_s = episode_timeout_s
        self._running: dict[str, float] = {}  # name of a rollout: when it began
        self._last_event = 0.0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollbook-player", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def close_all(self, things: Sequence[Closes]) -> None:
        """Close policies and environments in the event loop that they were used in."""
        for thing in things:
            asyncio.run_coroutine_threadsafe(thing.close(), self._loop).result()

    def groups(
        self,
        plans: Sequence[GroupPlan],
        policy: Policy,
        log: Recorder,
        *,
        version: int,
        stall_after_s: float,
        on_stall: Callable[[list[Waiting]], None] = lambda _: None,
        progress: Callable[[int, int], None] = lambda _done, _expected: None,
    ) -> Played:
        """Play every rollout of every group. Those that failed have no episode."""
        self._last_event = time.monotonic()
        future = asyncio.run_coroutine_threadsafe(
            self._play_all(plans, policy, log, version, progress), self._loop
        )
        try:
            while True:
                try:
                    return future.result(timeout=min(1.0, stall_after_s))
                except NotYet:
                    if future.done():  # just now, or it is the work itself that raised a TimeoutError
                        return future.result()
                    self._report_stall(stall_after_s, on_stall)
        except BaseException:
            future.cancel()
            raise

    async def _play_all(
        self,
        plans: Sequence[GroupPlan],
        policy: Policy,
        log: Recorder,
        version: int,
        progress: Callable[[int, int], None],
    ) -> Played:
        episodes: dict[int, list[Episode | None]] = {plan.group_idx: [None] * plan.size for plan in plans}
        rollouts = [Rollout(plan, number) for plan in plans for number in range(plan.size)]
        with ExitStack() as opened:
            logs = {
                plan.group_idx: opened.enter_context(
                    log.group(
                        plan.group_idx,
                        task_id=plan.task.id,
                        tags=plan.tags,
                        sampling_client_step=version,
                        size=plan.size,
                    )
                )
                for plan in plans
            }
            done = timeouts = retries = 0
            events = run_all(
                iter(rollouts),
                partial(self._play, policy),
                concurrency=len(rollouts),
                retry=self._retry,
                timeout_s=None,
            )
            async for event in events:
                self._last_event = time.monotonic()
                if not isinstance(event, Done):
                    timeouts += event.failure.kind is FailureKind.TIMEOUT
                if isinstance(event, Retry):
                    retries += 1
                    event.item = event.item._replace(attempt=event.item.attempt + 1)  # other seeds
                    continue
                rollout = event.item
                self._running.pop(rollout.name, None)
                if isinstance(event, Done):
                    episodes[rollout.plan.group_idx][rollout.traj_idx] = event.result
                self._record(logs[rollout.plan.group_idx], event)
                done += 1
                progress(done, len(rollouts))
        groups = [Group(plan.group_idx, episodes[plan.group_idx]) for plan in plans]
        return Played(groups, timeouts, retries)

    @staticmethod
    def _record(group: GroupRecorder, event: Done[Rollout, Episode] | GivenUp[Rollout]) -> None:
        if isinstance(event, Done):
            group.add(trajectory_of(event.result), event.item.traj_idx)
            return
        failure = event.failure
        partial = trajectory_of(failure.episode) if failure.episode is not None else None
        group.fail(f"{failure.kind}: {failure}", event.item.traj_idx, partial)

    async def _play(self, policy: Policy, rollout: Rollout) -> Episode:
        plan = rollout.plan
        seed = derive_seed(plan.seed, rollout.traj_idx, *([rollout.attempt] if rollout.attempt else []))
        task = Task(
            id=plan.task.id,
            row=plan.task.row,
            messages=plan.task.messages,
            tools=plan.task.tools,
            params=plan.task.params,
            repeat=rollout.traj_idx,
            seed=seed,
        )
        self._running[rollout.name] = time.monotonic()
        return await play(plan.make(), policy, task, max_turns=plan.max_turns, timeout_s=self._timeout_s)

    def _report_stall(self, after_s: float, on_stall: Callable[[list[Waiting]], None]) -> None:
        now = time.monotonic()
        if now - self._last_event < after_s or not self._running:
            return
        self._last_event = now
        running = sorted(self._running.items(), key=lambda item: item[1])
        on_stall([Waiting(name, now - began) for name, began in running])
