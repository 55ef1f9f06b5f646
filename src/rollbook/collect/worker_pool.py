"""Rollouts in several processes of this machine; one collector plans, leases and writes.

A worker holds a lease on the items it was sent and nothing else: it writes no file. When it dies, its leases
are lost outcomes, the scheduler gives the items to others, and a new worker takes its place. So the death of
any worker at any time costs only what it had in flight.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

from rollbook.collect.rows import Item, Outcome
from rollbook.collect.settings import CollectSettings
from rollbook.collect.wire import frame, items_frame, read_outcomes
from rollbook.errors import RollbookError
from rollbook.policies.base import FailureKind

_QUICK_DEATHS = 5  # workers in a row that died without a single outcome: something is wrong with all of them
_CLOSE_S, _HURRIED_CLOSE_S = 10.0, 0.5


class WorkerPool:
    def __init__(self, settings_bytes: bytes, count: int) -> None:
        self._settings = settings_bytes
        self._count = count
        self._workers: list[_Worker] = []
        self._quick_deaths = 0
        self._hopeless: RollbookError | None = None
        self._replacing = asyncio.Lock()

    @classmethod
    async def start(cls, settings: CollectSettings) -> WorkerPool:
        from rollbook.collect.collector import encode_settings

        pool = cls(encode_settings(settings), settings.workers)
        for _ in range(pool._count):
            pool._workers.append(await _Worker.start(pool._settings, pool._count_death))
        return pool

    async def run(self, item: Item) -> Outcome:
        while True:
            while (worker := self._least_busy()).is_dead:  # it holds nothing, so it comes first
                if self._hopeless is not None:
                    raise self._hopeless
                await self._replace_the_dead()
            outcome = await worker.run(item)
            if outcome.failure is not FailureKind.WORKER_LOST:
                self._quick_deaths = 0
                return outcome
            if self._hopeless is not None:  # what is wrong with all workers is not this rollout's failure
                raise self._hopeless
            if worker.was_ready:
                return outcome

    def drain(self) -> None:
        for worker in self._workers:
            worker.drain()

    async def close(self) -> None:
        await asyncio.gather(*(worker.close() for worker in self._workers))

    def _least_busy(self) -> _Worker:
        return min(self._workers, key=lambda worker: len(worker.leases))

    async def _replace_the_dead(self) -> None:
        async with self._replacing:  # all items of a dead worker come here together; the first one does it
            for place, worker in enumerate(self._workers):
                if worker.is_dead and self._hopeless is None:
                    self._workers[place] = await _Worker.start(self._settings, self._count_death)

    def _count_death(self, worker: _Worker) -> None:
        """Called before the worker's items hear of it, so that they do not use up their attempts first."""
        if worker.was_useful:
            return
        self._quick_deaths += 1
        if self._quick_deaths >= _QUICK_DEATHS and self._hopeless is None:
            self._hopeless = RollbookError(
                f"{_QUICK_DEATHS} worker processes in a row died before finishing anything "
                f"(the last one {worker.how_it_ended()}); their messages stand above"
            )


class _Worker:
    """One process and the items it holds."""

    def __init__(self, process: asyncio.subprocess.Process, on_death: Callable[[_Worker], None]) -> None:
        self._process = process
        self._on_death = on_death
        self.leases: dict[tuple[int, int], asyncio.Future[Outcome]] = {}
        self.is_dead = False
        self.was_ready = False  # it has built its environment and waits for items
        self.was_useful = False
        self._outbox: list[Item] = []
        self._listener: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, settings: bytes, on_death: Callable[[_Worker], None]) -> _Worker:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "rollbook.collect.worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        worker = cls(process, on_death)
        worker._write(frame(settings))
        worker._listener = asyncio.ensure_future(worker._listen())
        return worker

    async def run(self, item: Item) -> Outcome:
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        if self.is_dead:
            return _lost(item, "it was gone already")
        self.leases[item.row, item.repeat] = future
        self._outbox.append(item)
        if len(self._outbox) == 1:  # one frame for everything that is handed out in this turn of the loop
            asyncio.get_running_loop().call_soon(self._send)
        return await future

    def drain(self) -> None:
        self._send()
        self._write(items_frame([]))  # no items: that there will be no more

    def how_it_ended(self) -> str:
        code = self._process.returncode
        return f"with exit code {code}" if code is not None and code >= 0 else f"of signal {-(code or 0)}"

    async def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        # One that still holds items is stopped at once, in the middle of them: nobody waits for these.
        patience_s = _HURRIED_CLOSE_S if self.leases else _CLOSE_S
        try:
            await asyncio.wait_for(self._process.wait(), patience_s)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        if self._listener is not None:
            await self._listener

    def _send(self) -> None:
        items, self._outbox = self._outbox, []
        if items:
            self._write(items_frame(items))

    def _write(self, data: bytes) -> None:
        """To a process that has just died nothing can be written; its listener will say what that costs."""
        if self._process.stdin is not None and not self._process.stdin.is_closing():
            self._process.stdin.write(data)

    async def _listen(self) -> None:
        assert self._process.stdout is not None
        while (outcomes := await read_outcomes(self._process.stdout)) is not None:
            self.was_ready = True
            for outcome in outcomes:
                future = self.leases.pop((outcome.row, outcome.repeat), None)
                if future is not None and not future.done():
                    self.was_useful = True
                    future.set_result(outcome)
        self.is_dead = True
        await self._process.wait()
        self._on_death(self)
        for (row, repeat), future in self.leases.items():
            if not future.done():
                future.set_result(
                    _lost(Item(row, repeat, "", b""), f"its process ended {self.how_it_ended()}")
                )
        self.leases.clear()


def _lost(item: Item, why: str) -> Outcome:
    return Outcome(
        item.row, item.repeat, failure=FailureKind.WORKER_LOST, message=f"the worker was lost: {why}"
    )
