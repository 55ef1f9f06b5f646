"""Rollouts in other processes. The collector alone plans and writes; a worker holds nothing but items.

When a worker dies, its items are failures of the kind `worker_lost`, which others try again, and a new worker
takes its place. The last attempt at an item that was lost before is made by a worker that does nothing else
meanwhile: no item is given up for what its neighbours did. Only workers that die before they can take any
item, one after the other, end the collection.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Awaitable, Callable
from typing import Protocol

from rollbook.collect.items import Answer, Attempted, Failure, Item, Line, decode_answer, encode_item
from rollbook.collect.settings import CollectSettings, encode_settings
from rollbook.errors import RollbookError
from rollbook.rollouts.types import FailureKind
from rollbook.runs.frames import Child

_MOST_DEATHS = 5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 30.0
_CLOSE_S, _HURRIED_CLOSE_S = 10.0, 0.5


class WorkerDied(Exception):
    """The worker has ended; the text says how."""


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
        self._deaths = 0  # of workers that never began, since one did
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
            try:
                if self._apart is None:
                    self._apart = await self._start()
                    await self._apart.begin()
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
        pause = _FIRST_PAUSE_S
        try:
            while not self._is_closing:
                worker = await self._start()
                await self._serve(worker)
                if worker in self._used:
                    self._used.remove(worker)
                    pause = _FIRST_PAUSE_S
                else:  # no item pays for its death with an attempt: nothing else ends these
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE_S)
        except Exception as error:  # the next one would meet it too
            self._error = error
            self._changed.set()

    async def _serve(self, worker: Worker) -> None:
        try:
            await worker.begin()
            self._deaths = 0
            self._busy[worker] = 0
            self._changed.set()
            await worker.ended()
        except WorkerDied as death:
            self._deaths += worker not in self._busy
            if self._deaths >= _MOST_DEATHS:
                raise RollbookError(
                    f"{_MOST_DEATHS} {self._names} in a row died before they could begin "
                    f"(the last one: {death}); {self._log}"
                ) from None
        finally:
            self._busy.pop(worker, None)
            await worker.kill()


class WorkerProcess:
    """A worker on this machine."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._waiting: dict[tuple[int, int], asyncio.Future[Answer]] = {}
        self._answers: asyncio.Task[str] | None = None

    async def begin(self) -> None:
        if await self._child.receive() is None:
            raise WorkerDied(await self._how_it_ended())
        self._answers = asyncio.ensure_future(self._hand_out_answers())

    async def run(self, item: Item) -> Answer:
        assert self._answers is not None
        if self._answers.done():
            raise WorkerDied(self._answers.result())
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[item.row, item.repeat] = future
        self._child.send(encode_item(item))
        return await future

    async def ended(self) -> None:
        assert self._answers is not None
        raise WorkerDied(await self._answers)

    async def close(self) -> None:
        # One that still works is stopped at once, in the middle of it: nobody waits for that.
        is_busy = any(not future.done() for future in self._waiting.values())
        await self._child.end(_HURRIED_CLOSE_S if is_busy else _CLOSE_S)

    async def kill(self) -> None:
        await self._child.end()

    async def _hand_out_answers(self) -> str:
        """Until there are no more; returns how the process ended."""
        while (data := await self._child.receive()) is not None:
            answer = decode_answer(data)
            future = self._waiting.pop((answer.row, answer.repeat))
            if not future.done():
                future.set_result(answer)
        how = await self._how_it_ended()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(WorkerDied(how))
        return how

    async def _how_it_ended(self) -> str:
        return f"its process ended {await self._child.end(_CLOSE_S)}"


def worker_processes(settings: CollectSettings) -> WorkerGroup:
    encoded = encode_settings(settings)

    async def start() -> Worker:
        child = await Child.start("rollbook.collect.worker_main", str(os.getpid()))
        child.send(encoded)
        return WorkerProcess(child)

    return WorkerGroup(settings, start, "worker processes", "their messages are above")
