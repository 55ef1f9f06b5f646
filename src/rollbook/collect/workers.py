"""Rollouts in other processes. The collector alone plans and writes; a worker holds nothing but items.

When a worker dies, its items are failures of the kind `worker_lost`, which others try again, and a new worker
takes its place. The last attempt at an item that was lost before is made by a worker that does nothing else
meanwhile: no item is given up for what its neighbours did.

Workers that die before they can take any item, one after the other, end the collection: soon where they end
by themselves, as the next one will too; later where somebody or something kills them, which may pass.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Protocol

from rollbook.collect.items import Answer, Attempted, Failure, Item, Line, decode_answer, encode_item
from rollbook.collect.settings import CollectSettings, encode_settings
from rollbook.errors import RollbookError
from rollbook.rollouts.types import FailureKind
from rollbook.runs.frames import Child

_MOST_DEATHS, _MOST_KILLED = 5, 20  # in a row, before they could begin
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 30.0
_CLOSE_S, _HURRIED_CLOSE_S = 10.0, 0.5
# What others send. Of the rest, such as SIGSEGV, a process dies by its own doing.
_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


class WorkerDied(Exception):
    """The worker has ended; the text says how."""

    def __init__(self, how: str, *, was_killed: bool = False) -> None:
        """`was_killed`: from outside, which says nothing about the next one."""
        super().__init__(how)
        self.was_killed = was_killed


class Worker(Protocol):
    """A process elsewhere that does rollouts. Each method raises WorkerDied when it has ended."""

    async def begin(self) -> None:
        """Until it can take items."""

    async def run(self, item: Item) -> Answer: ...

    async def ended(self) -> None:
        """Until it has ended."""

    async def close(self) -> None:
        """Let it end by itself, if it has nothing to do."""

    async def kill(self) -> None: ...


class WorkerGroup:
    """As many workers as the settings say. An item goes to the least busy one, which has at most its share:
    those that begin first leave something to the others."""

    def __init__(
        self, settings: CollectSettings, start: Callable[[], Awaitable[Worker]], names: str, log: str
    ) -> None:
        """`names` is what workers are called, `log` says where their messages are, both for people."""
        self._share = math.ceil(settings.num_samples_in_parallel / settings.workers)
        self._start, self._names, self._log = start, names, log
        self._busy: dict[Worker, int] = {}  # how many items each has that can take some
        self._used: set[Worker] = set()  # that were given items
        self._changed = asyncio.Event()
        self._apart: Worker | None = None  # for one item at a time
        self._one_apart = asyncio.Lock()
        self._deaths = self._killed = 0  # of workers that never began, since one did
        self._error: Exception | None = None
        self._is_closing = False
        self._places = [asyncio.ensure_future(self._keep_running()) for _ in range(settings.workers)]

    async def run(self, item: Item) -> Line:
        try:
            answer = await (self._run_apart(item) if item.alone else self._run(item))
        except WorkerDied as death:
            lost = Failure(FailureKind.WORKER_LOST, f"the worker was lost: {death}")
            raise Attempted(lost) from None
        return answer.result()

    async def close(self) -> None:
        self._is_closing = True
        workers = [*self._busy, *([self._apart] if self._apart else [])]
        await asyncio.gather(*(worker.close() for worker in workers))
        for place in self._places:
            place.cancel()
        await asyncio.gather(*self._places, return_exceptions=True)

    async def _run(self, item: Item) -> Answer:
        worker = await self._least_busy()
        self._busy[worker] += 1
        self._used.add(worker)
        try:
            return await worker.run(item)
        finally:
            if worker in self._busy:
                self._busy[worker] -= 1
            self._changed.set()

    async def _run_apart(self, item: Item) -> Answer:
        async with self._one_apart:
            if self._apart is None:
                self._apart = await self._begin_one()
            try:
                return await self._apart.run(item)
            except WorkerDied:
                self._apart = None
                raise

    async def _least_busy(self) -> Worker:
        while self._error is None:
            worker = min(self._busy, key=self._busy.__getitem__, default=None)
            if worker is not None and self._busy[worker] < self._share:
                return worker
            self._changed.clear()
            await self._changed.wait()
        raise self._error

    async def _keep_running(self) -> None:
        """One place of the group: a worker, and after it another, until the end."""
        pause = _Pause()
        try:
            while not self._is_closing:
                worker = await self._begin_one()
                await self._serve(worker)
                if worker in self._used:
                    self._used.remove(worker)
                    pause = _Pause()
                else:  # no item pays for its death with an attempt: nothing else ends these
                    await pause.over()
        except Exception as error:  # the next one would meet it too
            self._error = error
            self._changed.set()

    async def _begin_one(self) -> Worker:
        """A worker that can take items; where one dies before it can, another is tried."""
        pause = _Pause()
        while True:
            worker = await self._start()
            try:
                await worker.begin()
            except BaseException as error:
                await worker.kill()
                if not isinstance(error, WorkerDied):
                    raise
                self._count_death(error)
                await pause.over()
            else:
                self._deaths = self._killed = 0
                return worker

    def _count_death(self, death: WorkerDied) -> None:
        if death.was_killed:
            self._killed += 1
        else:
            self._deaths += 1
        if self._deaths >= _MOST_DEATHS:
            raise RollbookError(
                f"{_MOST_DEATHS} {self._names} in a row died before they could begin "
                f"(the last one: {death}); {self._log}"
            ) from None
        if self._killed >= _MOST_KILLED:
            raise RollbookError(
                f"{_MOST_KILLED} {self._names} in a row were killed before they could begin (the last one: "
                f"{death}); if memory ran out (see: dmesg | grep -i oom), set fewer workers=, then type the "
                "same command"
            ) from None

    async def _serve(self, worker: Worker) -> None:
        """Until it has ended."""
        self._busy[worker] = 0
        self._changed.set()
        try:
            await worker.ended()
        except WorkerDied:
            pass
        finally:
            self._busy.pop(worker, None)
            await worker.kill()


class _Pause:
    """Waits, each time twice as long."""

    def __init__(self) -> None:
        self._seconds = _FIRST_PAUSE_S

    async def over(self) -> None:
        seconds, self._seconds = self._seconds, min(2 * self._seconds, _LONGEST_PAUSE_S)
        await asyncio.sleep(seconds)


class WorkerProcess:
    """A worker on this machine."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._waiting: dict[tuple[int, int], asyncio.Future[Answer]] = {}
        self._answers: asyncio.Task[int] | None = None

    async def begin(self) -> None:
        if await self._child.receive() is None:
            raise _death(await self._child.end(_CLOSE_S))
        self._answers = asyncio.ensure_future(self._hand_out_answers())

    async def run(self, item: Item) -> Answer:
        assert self._answers is not None
        if self._answers.done():
            raise _death(self._answers.result())
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[item.row, item.repeat] = future
        self._child.send(encode_item(item))
        return await future

    async def ended(self) -> None:
        assert self._answers is not None
        raise _death(await self._answers)

    async def close(self) -> None:
        # One that still works is stopped at once, in the middle of it: nobody waits for that.
        is_busy = any(not future.done() for future in self._waiting.values())
        await self._child.end(_HURRIED_CLOSE_S if is_busy else _CLOSE_S)

    async def kill(self) -> None:
        await self._child.end()

    async def _hand_out_answers(self) -> int:
        """Until there are no more; returns the exit code of the process."""
        while (data := await self._child.receive()) is not None:
            answer = decode_answer(data)
            future = self._waiting.pop((answer.row, answer.repeat))
            if not future.done():
                future.set_result(answer)
        code = await self._child.end(_CLOSE_S)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(_death(code))
        return code


def _death(code: int) -> WorkerDied:
    """The end of a worker process, by its exit code as Python has it."""
    if code >= 0:
        return WorkerDied(f"its process ended with exit code {code}")
    how = f"its process ended of signal {-code}"
    if code == -signal.SIGKILL:
        how += " (SIGKILL, which the kernel sends when memory runs out)"
    return WorkerDied(how, was_killed=-code in _FROM_OUTSIDE)


def worker_processes(settings: CollectSettings) -> WorkerGroup:
    encoded = encode_settings(settings)

    async def start() -> Worker:
        child = await Child.start("rollbook.collect.worker_main", str(os.getpid()))
        child.send(encoded)
        return WorkerProcess(child)

    return WorkerGroup(settings, start, "worker processes", "their messages are above")
