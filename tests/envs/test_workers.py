"""Processes for patterns: interrupted, killed, replaced, and never the event loop's problem."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from rollbook.envs.workers import PROCESSES, TooMuchWork, Workers, WorkFailed


async def _with_workers(work: Any, **options: Any) -> Any:
    workers = Workers(**options)
    try:
        return await work(workers)
    finally:
        await workers.close()


def pid_of(process: Any) -> int:
    return int(process._process.pid)


def test_many_jobs_share_few_processes() -> None:
    async def work(workers: Workers) -> list[Any]:
        jobs = [workers.do("search", patterns=[f"^{n}$"], text=str(n), flags=0) for n in range(100)]
        found = await asyncio.gather(*jobs)
        assert len(workers._idle) <= PROCESSES
        return list(found)

    assert asyncio.run(_with_workers(work)) == [True] * 100


def test_an_interrupted_job_leaves_its_process_usable() -> None:
    async def work(workers: Workers) -> None:
        with pytest.raises(TooMuchWork, match="longer than"):
            await workers.do("search", patterns=["(a+)+$"], text="a" * 64 + "b", flags=0)
        (before,) = map(pid_of, workers._idle)
        assert await workers.do("extract", pattern="x(.)", text="xaxb", flags=0) == "b"
        assert list(map(pid_of, workers._idle)) == [before]

    asyncio.run(_with_workers(work, limit_s=0.3))


def test_a_process_that_cannot_be_interrupted_is_killed_and_replaced() -> None:
    async def work(workers: Workers) -> None:
        assert await workers.do("search", patterns=["a"], text="a", flags=0)
        pid = pid_of(workers._idle[0])
        os.kill(pid, signal.SIGSTOP)  # it hears no alarm, as in a long computation in C
        with pytest.raises(TooMuchWork, match="could not be interrupted"):
            await workers.do("search", patterns=["a"], text="a", flags=0)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        assert await workers.do("search", patterns=["a"], text="a", flags=0)

    asyncio.run(_with_workers(work, limit_s=0.2))


def test_a_process_that_died_is_replaced_and_the_job_done() -> None:
    async def work(workers: Workers) -> None:
        assert await workers.do("search", patterns=["a"], text="a", flags=0)
        os.kill(pid_of(workers._idle[0]), signal.SIGKILL)
        assert await workers.do("search", patterns=["a"], text="a", flags=0)

    asyncio.run(_with_workers(work))


def test_a_job_that_raises_says_what() -> None:
    async def work(workers: Workers) -> None:
        with pytest.raises(WorkFailed, match="missing"):
            await workers.do("search", patterns=["(a"], text="a", flags=0)
        assert len(workers._idle) == 1

    asyncio.run(_with_workers(work))


def test_giving_up_on_a_job_frees_its_place() -> None:
    async def work(workers: Workers) -> None:
        jobs = [
            asyncio.create_task(workers.do("search", patterns=["(a+)+$"], text="a" * 64 + "b", flags=0))
            for _ in range(PROCESSES)
        ]
        await asyncio.sleep(0.5)
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        assert await workers.do("search", patterns=["a"], text="a", flags=0)

    asyncio.run(_with_workers(work, limit_s=30.0))


def test_no_process_outlives_close() -> None:
    pids: list[int] = []

    async def work(workers: Workers) -> None:
        await asyncio.gather(
            *(workers.do("search", patterns=["a"], text="a", flags=0) for _ in range(PROCESSES))
        )
        pids.extend(map(pid_of, workers._idle))

    asyncio.run(_with_workers(work))
    assert pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_one_pool_may_follow_from_loop_to_loop() -> None:
    workers = Workers()

    async def once() -> bool:
        try:
            return bool(await workers.do("search", patterns=["a"], text="a", flags=0))
        finally:
            await workers.close()

    assert [asyncio.run(once()) for _ in range(2)] == [True, True]
