"""An answer that does not end, or is small only until it is unpacked: read up to a limit, then a failure."""

from __future__ import annotations

import asyncio
import tracemalloc
import zlib
from typing import Any

import pytest
from aiohttp import web

from fake_servers import Handler, Told, chat_answer, serving
from rollbook.envs.gym_bridge import GymAgent
from rollbook.envs.judge import Judge, JudgeSettings
from rollbook.errors import UsageError
from rollbook.policies.openai import OpenAIPolicy, OpenAISettings
from rollbook.rollouts.types import FailureKind, Request, RolloutFailure, Task

LIMIT = 100_000


async def endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b" " * 10_000)


def packed(encoding: str, size: int, bits: int) -> Handler:
    """A gigabyte of blanks is a megabyte on the way."""
    packing = zlib.compressobj(9, zlib.DEFLATED, bits)
    body = b"".join([*(packing.compress(b" " * (1 << 20)) for _ in range(size >> 20)), packing.flush()])

    async def handle(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, headers={"Content-Encoding": encoding})

    return handle


def failure(handler: Handler, **options: Any) -> RolloutFailure:
    async def run() -> None:
        async with serving(handler) as url:
            policy = OpenAIPolicy(OpenAISettings(base_url=url, model="m", **options))
            try:
                await policy.act(Request(({"role": "user", "content": "2 + 2?"},)))
            finally:
                await policy.close()

    with pytest.raises(RolloutFailure) as caught:
        asyncio.run(run())
    return caught.value


def test_an_endless_answer() -> None:
    told = failure(endless, max_response_bytes=LIMIT)
    assert told.kind is FailureKind.BAD_ANSWER
    assert "more than 100000 bytes (max_response_bytes)" in str(told)


def test_the_body_of_an_error_is_bounded_too() -> None:
    told = failure(Told(b"x" * (LIMIT + 1), status=500), max_response_bytes=LIMIT)
    assert told.kind is FailureKind.BAD_ANSWER


@pytest.mark.parametrize(("encoding", "bits"), [("gzip", 31), ("deflate", 15)])
def test_a_gigabyte_packed_into_a_megabyte_is_never_unpacked_whole(encoding: str, bits: int) -> None:
    bomb = packed(encoding, 1 << 30, bits)
    tracemalloc.start()
    told = failure(bomb, max_response_bytes=LIMIT)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert told.kind is FailureKind.BAD_ANSWER
    assert peak < 50 << 20


def test_an_answer_of_just_the_limit_is_read() -> None:
    async def run(answer: bytes, limit: int) -> str:
        async with serving(Told(answer)) as url:
            settings = OpenAISettings(base_url=url, model="m", max_response_bytes=limit)
            policy = OpenAIPolicy(settings)
            try:
                return (await policy.act(Request(({"role": "user", "content": "?"},)))).message["content"]
            finally:
                await policy.close()

    import orjson

    answer = orjson.dumps(chat_answer("4" * 300_000))
    assert asyncio.run(run(answer, len(answer))) == "4" * 300_000
    with pytest.raises(RolloutFailure, match="max_response_bytes"):
        asyncio.run(run(answer, len(answer) - 1))


def test_a_judge_and_an_agent_server_are_bounded_as_well() -> None:
    async def run() -> None:
        async with serving(endless) as url:
            judge = Judge(JudgeSettings(base_url=url, model="m", max_response_bytes=LIMIT))
            with pytest.raises(RolloutFailure, match="max_response_bytes") as caught:
                await judge.grade(Task(id="t", messages=[], row={}), ["4"], "4")
            assert caught.value.kind is FailureKind.JUDGE
            await judge.close()
            agent = GymAgent(url, max_response_bytes=LIMIT)
            with pytest.raises(RolloutFailure, match="max_response_bytes") as caught:
                await agent.run(Task(id="t", messages=[], row={}))
            assert caught.value.kind is FailureKind.BAD_ANSWER
            await agent.close()

    asyncio.run(run())


def test_a_limit_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match=r"policy\.max_response_bytes is 0"):
        OpenAIPolicy(OpenAISettings(base_url="http://h/v1", model="m", max_response_bytes=0))
