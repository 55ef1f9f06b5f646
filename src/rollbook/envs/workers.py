"""A few processes that work out patterns and formulas, so that none can hold up the event loop.

A job past its time is interrupted inside the process; one that cannot be interrupted is killed with it, and
the next job gets a new process. Time spent waiting for a free process does not count.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from rollbook.runs.frames import Child

PROCESSES = 2
_GRACE_S = 1.0  # between the interruption and the kill
_START_S = 120.0
_TRIES = 2  # a process may have died for reasons of its own


class TooMuchWork(Exception):
    """A job that was not done in its time or memory."""


class WorkFailed(Exception):
    """A job that raised, or took its process down."""


class Workers:
    def __init__(self, *, maths: bool = False, limit_s: float = 5.0) -> None:
        self.limit_s = limit_s
        self._maths = maths
        self._idle: list[Child] = []
        self._free = asyncio.Semaphore(PROCESSES)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def do(self, job: str, **arguments: Any) -> Any:
        self._follow_loop()
        async with self._free:
            for _ in range(_TRIES):
                process = self._idle.pop() if self._idle else await self._start()
                answer = await self._ask(process, {"do": job, "limit_s": self.limit_s, **arguments})
                if answer is not None:
                    return _result(answer)
            raise WorkFailed("the process that worked on it died, twice")

    async def close(self) -> None:
        idle, self._idle = self._idle, []
        for process in idle:
            await process.end()

    async def _start(self) -> Child:
        # Quiet, so that Ctrl-C is for the collector, which then finishes what is under way.
        process = await Child.start("rollbook.envs.worker", quiet=True)
        warm_up = {"do": "warm_up", "limit_s": _START_S, "maths": self._maths}
        answer = await self._ask(process, warm_up)
        if answer is None or not answer.get("result"):
            raise WorkFailed(f"a process for grading could not be started: {answer}")
        return self._idle.pop()

    async def _ask(self, process: Child, job: dict[str, Any]) -> dict[str, Any] | None:
        """The process's answer, after which it is idle; None when it died over it."""
        try:
            async with asyncio.timeout(job["limit_s"] + _GRACE_S):
                process.send(json.dumps(job).encode())
                data = await process.receive()
        except TimeoutError:
            await process.end()
            return {"too_much": f"longer than {job['limit_s']:g} s, and could not be interrupted"}
        except BaseException:
            await process.end()
            raise
        if data is None:
            await process.end()
            return None
        self._idle.append(process)
        answer: dict[str, Any] = json.loads(data)
        return answer

    def _follow_loop(self) -> None:
        """Processes belong to the event loop they were started in."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._idle, self._free = loop, [], asyncio.Semaphore(PROCESSES)


def _result(answer: dict[str, Any]) -> Any:
    if "too_much" in answer:
        raise TooMuchWork(answer["too_much"])
    if "error" in answer:
        raise WorkFailed(answer["error"])
    return answer["result"]
