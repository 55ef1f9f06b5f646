"""Plays the groups of an iteration or an evaluation, all at once, and records each rollout when it ends.

The event loop lives in a thread of its own, so that the story of a run is plain calls. What comes out does
not depend on the order in which rollouts end: every seed follows from the run's seed, the iteration, the
task and the sample.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import TimeoutError as NotYet
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, NamedTuple, Protocol, Self

from rollbook.errors import RollbookError
from rollbook.records.identity import derive_seed
from rollbook.records.rollouts import Trajectory
from rollbook.rl.groups import Group
from rollbook.rl.pulse import Blocked, Pulse
from rollbook.rollouts.episode import play
from rollbook.rollouts.retry import RetrySettings
from rollbook.rollouts.runner import Done, GivenUp, Retry, run_all
from rollbook.rollouts.trajectory import trajectory_of
from rollbook.rollouts.types import EnvironmentProtocol, Episode, FailureKind, Policy, Task

_PATIENCE_S = 5.0  # with an event loop that is blocked
_CLEAN_UP_S = 60.0  # for environments to close


class BlockedError(RollbookError):
    """An environment has not returned for longer than an episode may take."""


class AbandonedError(Exception):
    """Rollouts were given up before they were done, because somebody wants the job to end."""


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


class Stall(NamedTuple):
    """Nothing has finished for a while."""

    waiting: list[Waiting]  # the oldest first
    blocked: Blocked | None  # what holds up all of them, if something does

    def __str__(self) -> str:
        first = self.waiting[0] if self.waiting else Waiting("none has begun", 0.0)
        text = f"{len(self.waiting)} rollouts are open; the oldest, {first.name}, for {first.seconds:.0f} s"
        if self.blocked is not None:
            text += f". {self.blocked.place} has held up all of them for {self.blocked.seconds:.0f} s"
        return text


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
    errors: list[str]  # of the rollouts that failed, in the order of the groups

    @property
    def all_failed(self) -> bool:
        return all(episode is None for group in self.groups for episode in group.episodes)

    @property
    def why_failed(self) -> str:
        """How many failed, and what most of them failed with."""
        ((error, count),) = Counter(self.errors).most_common(1)
        total = sum(len(group.episodes) for group in self.groups)
        failed = len(self.errors)
        which = "" if count == failed else f"{count} times " if count > 1 else "the first one "
        return f"{failed} of {total} rollouts failed: {which}{error}"


class Closes(Protocol):
    def close(self) -> Coroutine[Any, Any, None]: ...


class Player:
    def __init__(
        self,
        retry: RetrySettings,
        *,
        episode_timeout_s: float | None = None,
        call_timeout_s: float | None = None,
    ) -> None:
        self._retry = retry
        self._timeout_s, self._call_timeout_s = episode_timeout_s, call_timeout_s
        self._running: dict[str, float] = {}  # name of a rollout: when it began
        self._last_event = 0.0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollbook-player", daemon=True)
        self._pulse = Pulse(self._loop, self._thread)
        self._is_stuck = False  # an environment does not return; it is left to the end of the process

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        if not self._is_stuck:
            self._thread.join()
            self._loop.close()

    def _responds(self) -> bool:
        self._is_stuck = self._is_stuck or not self._pulse.answers_within(_PATIENCE_S)
        return not self._is_stuck

    def close_all(self, things: Sequence[Closes]) -> None:
        """Close policies and environments in the event loop that they were used in."""
        for thing in things:
            if not self._responds():
                return
            asyncio.run_coroutine_threadsafe(thing.close(), self._loop).result()

    def groups(
        self,
        plans: Sequence[GroupPlan],
        policy: Policy,
        log: Recorder,
        *,
        version: int,
        stall_after_s: float,
        on_stall: Callable[[Stall], None] = lambda _: None,
        progress: Callable[[int, int], None] = lambda _done, _expected: None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> Played:
        """Play every rollout of every group. Those that failed have no episode.

        Once `is_over` says so, what is still being played is given up with an AbandonedError.
        """
        self._last_event = time.monotonic()
        ended = threading.Event()

        async def play_all() -> Played:
            try:
                return await self._play_all(plans, policy, log, version, progress)
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(play_all(), self._loop)
        try:
            while True:
                try:
                    return future.result(timeout=min(1.0, stall_after_s))
                except NotYet:
                    if future.done():  # just now, or it is the work itself that raised a TimeoutError
                        return future.result()
                    self._look(stall_after_s, on_stall)
                    if is_over():
                        raise AbandonedError from None
        except BaseException:
            future.cancel()
            if self._responds():
                ended.wait(_CLEAN_UP_S)  # what was open is recorded as failed before the log is closed
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
        errors: dict[tuple[int, int], str] = {}
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
                else:
                    place = rollout.plan.group_idx, rollout.traj_idx
                    errors[place] = f"{event.failure.kind}: {event.failure}"
                self._record(logs[rollout.plan.group_idx], event)
                done += 1
                progress(done, len(rollouts))
        groups = [Group(plan.group_idx, episodes[plan.group_idx]) for plan in plans]
        return Played(groups, timeouts, retries, [errors[place] for place in sorted(errors)])

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
        return await play(
            plan.make(),
            policy,
            task,
            max_turns=plan.max_turns,
            timeout_s=self._timeout_s,
            call_timeout_s=self._call_timeout_s,
        )

    def _look(self, stall_after_s: float, on_stall: Callable[[Stall], None]) -> None:
        """Report a stall; raise BlockedError where a time-out is due that nothing but this can enforce."""
        now, blocked = time.monotonic(), self._pulse.look()
        limits = {"episode_timeout_s": self._timeout_s, "call_timeout_s": self._call_timeout_s}
        for name, limit in limits.items():
            if blocked is not None and limit is not None and blocked.seconds > limit + _PATIENCE_S:
                self._is_stuck = True
                raise BlockedError(
                    f"{blocked.place} has held up all rollouts for {blocked.seconds:.0f} s; {name} is "
                    f"{limit:g}. Only what waits with await can be interrupted: make it async, or give it a "
                    "time limit of its own"
                )
        if now - self._last_event < stall_after_s or not (self._running or blocked):
            return
        self._last_event = now
        running = sorted(self._running.items(), key=lambda item: item[1])
        on_stall(Stall([Waiting(name, now - began) for name, began in running], blocked))
