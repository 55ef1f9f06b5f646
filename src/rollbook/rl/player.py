"""Plays the groups of an iteration or an evaluation, many at once, and records each rollout when it ends.

Rollouts begin one after the other while there is room, so an evaluation of many tasks takes no more memory
than one of a few. The event loop lives in a thread of its own, so that the story of a run is plain calls.
What comes out does not depend on the order in which rollouts end: every seed follows from the run's seed, the
iteration, the task and the sample.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import TimeoutError as NotYet
from contextlib import aclosing
from functools import partial
from typing import Any, NamedTuple, Protocol, Self

from rollbook.errors import RollbookError
from rollbook.records import logtree
from rollbook.records.identity import derive_seed
from rollbook.rl.groups import Group
from rollbook.rl.open_groups import GroupPlan, GroupRecorder, OpenGroups, Recorder
from rollbook.rl.pulse import Blocked, Pulse
from rollbook.rl.settings import RlSettings
from rollbook.rollouts.episode import play
from rollbook.rollouts.retry import RetrySettings
from rollbook.rollouts.runner import Done, GivenUp, Retry, run_all
from rollbook.rollouts.trajectory import trajectory_of
from rollbook.rollouts.types import (
    Completion,
    EnvironmentProtocol,
    Episode,
    FailureKind,
    OutOfTokens,
    Policy,
    Request,
    RolloutFailure,
    Task,
)

LEAST_AT_ONCE, _TIMES_SLOTS = 64, 4  # rollouts that are played at the same time
_PATIENCE_S = 5.0  # with an event loop that is blocked
_OPENING_S = 60.0  # for an environment to show what it opens with
_CLEAN_UP_S = 60.0  # for environments to close


class BlockedError(RollbookError):
    """An environment has not returned for longer than an episode may take."""


class AbandonedError(Exception):
    """Rollouts were given up before they were done, because somebody wants the job to end."""


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


class Played(NamedTuple):
    """How the rollouts of an iteration or an evaluation went."""

    groups: list[Group]  # with their episodes; none where nobody trains on them
    rollouts: int
    timeouts: int  # attempts that ran out of time
    retries: int  # attempts that were made again
    errors: dict[str, int]  # how many rollouts failed with each, in the order of the groups

    @property
    def failed(self) -> int:
        return sum(self.errors.values())

    @property
    def all_failed(self) -> bool:
        return 0 < self.failed == self.rollouts

    @property
    def why_failed(self) -> str:
        """How many failed, and what most of them failed with."""
        error, count = max(self.errors.items(), key=lambda item: item[1])
        which = "" if count == self.failed else f"{count} times " if count > 1 else "the first one "
        return f"{self.failed} of {self.rollouts} rollouts failed: {which}{error}"


class _Tally:
    """What a Played is made of, while rollouts end in any order."""

    def __init__(self) -> None:
        self.done = self.timeouts = self.retries = 0
        self.episodes: dict[int, list[Episode | None]] = {}  # by group, where they are kept
        self._errors: dict[str, tuple[tuple[int, int], int]] = {}  # the first place of each, and how many

    def note_failure(self, rollout: Rollout, failure: RolloutFailure) -> None:
        text, place = f"{failure.kind}: {failure}", (rollout.plan.group_idx, rollout.traj_idx)
        first, count = self._errors.get(text, (place, 0))
        self._errors[text] = min(first, place), count + 1

    def played(self) -> Played:
        groups = [Group(group_idx, episodes) for group_idx, episodes in self.episodes.items()]
        errors = sorted((place, text, count) for text, (place, count) in self._errors.items())
        by_text = {text: count for _, text, count in errors}
        return Played(groups, self.done, self.timeouts, self.retries, by_text)


class _Nobody:
    """A policy that says nothing."""

    async def act(self, request: Request) -> Completion:
        raise OutOfTokens("nothing is sampled")

    async def close(self) -> None:
        return None


class Closes(Protocol):
    def close(self) -> Coroutine[Any, Any, None]: ...


class Player:
    def __init__(
        self,
        retry: RetrySettings,
        *,
        at_once: int = LEAST_AT_ONCE,
        episode_timeout_s: float | None = None,
        call_timeout_s: float | None = None,
    ) -> None:
        """`at_once` is how many rollouts are played at the same time."""
        self._retry, self.at_once = retry, at_once
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

    def opening(self, make: Callable[[], EnvironmentProtocol], task: Task) -> Episode | None:
        """What an environment shows first for a task; None where it fails, as its rollouts will say, or takes
        longer than a minute."""
        limit = min(self._timeout_s or _OPENING_S, _OPENING_S)

        async def look() -> Episode | None:
            try:
                await play(make(), _Nobody(), task, max_turns=1, timeout_s=limit)
            except Exception as error:
                return error.episode if isinstance(error, RolloutFailure) else None
            return None

        future = asyncio.run_coroutine_threadsafe(look(), self._loop)
        try:
            return future.result(limit + _PATIENCE_S)
        except NotYet:
            future.cancel()
            return None

    def close_all(self, things: Sequence[Closes]) -> None:
        """Close policies and environments in the event loop that they were used in."""
        for thing in things:
            if not self._responds():
                return
            asyncio.run_coroutine_threadsafe(thing.close(), self._loop).result()

    def groups(
        self,
        plans: Iterable[GroupPlan],
        policy: Policy,
        log: Recorder,
        *,
        version: int,
        rollouts: int,
        stall_after_s: float,
        keep_episodes: bool = True,
        on_stall: Callable[[Stall], None] = lambda _: None,
        progress: Callable[[int, int], None] = lambda _done, _expected: None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> Played:
        """Play every rollout of every group, `rollouts` in all. Those that failed have no episode.

        Once `is_over` says so, what is still being played is given up with an AbandonedError.
        """
        self._last_event = time.monotonic()
        ended = threading.Event()

        def show(done: int) -> None:
            progress(done, rollouts)

        async def play_all() -> Played:
            try:
                return await self._play_all(plans, policy, log, version, keep_episodes, show)
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
        plans: Iterable[GroupPlan],
        policy: Policy,
        log: Recorder,
        version: int,
        keep_episodes: bool,
        show: Callable[[int], None],
    ) -> Played:
        tally = _Tally()
        with OpenGroups(log, version) as opened:

            def rollouts() -> Iterator[Rollout]:
                for plan in plans:
                    opened.begin(plan)
                    if keep_episodes:
                        tally.episodes[plan.group_idx] = [None] * plan.size
                    yield from (Rollout(plan, number) for number in range(plan.size))

            running = run_all(
                rollouts(),
                partial(self._play, policy, opened),
                concurrency=self.at_once,
                retry=self._retry,
                timeout_s=None,
            )
            async with aclosing(running) as events:
                async for event in events:
                    self._last_event = time.monotonic()
                    if not isinstance(event, Done):
                        tally.timeouts += event.failure.kind is FailureKind.TIMEOUT
                    if isinstance(event, Retry):
                        tally.retries += 1
                        event.item = event.item._replace(attempt=event.item.attempt + 1)  # other seeds
                        continue
                    self._end(event, opened, tally)
                    show(tally.done)
        return tally.played()

    def _end(
        self, event: Done[Rollout, Episode] | GivenUp[Rollout], opened: OpenGroups, tally: _Tally
    ) -> None:
        rollout = event.item
        group_idx = rollout.plan.group_idx
        self._running.pop(rollout.name, None)
        if not isinstance(event, Done):
            tally.note_failure(rollout, event.failure)
        elif group_idx in tally.episodes:
            tally.episodes[group_idx][rollout.traj_idx] = event.result
        self._record(opened.recorder(group_idx), event)
        opened.end_rollout(group_idx)
        tally.done += 1

    @staticmethod
    def _record(group: GroupRecorder, event: Done[Rollout, Episode] | GivenUp[Rollout]) -> None:
        if isinstance(event, Done):
            group.add(trajectory_of(event.result), event.item.traj_idx)
            return
        failure = event.failure
        partial = trajectory_of(failure.episode) if failure.episode is not None else None
        group.fail(f"{failure.kind}: {failure}", event.item.traj_idx, partial)

    async def _play(self, policy: Policy, opened: OpenGroups, rollout: Rollout) -> Episode:
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
        with logtree.under(opened.recorder(plan.group_idx).node):
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


def open_player(settings: RlSettings) -> Player:
    return Player(
        settings.retry,
        episode_timeout_s=settings.episode_timeout_s,
        call_timeout_s=settings.call_timeout_s,
    )


def enough_for(slots: int) -> int:
    """How many rollouts keep this many slots busy while some wait for their environments."""
    return max(LEAST_AT_ONCE, _TIMES_SLOTS * slots)
