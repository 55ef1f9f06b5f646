"""One connection serves request after request; one that was let go of in the middle serves none."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress

from aiohttp import web

from fake_servers import serving
from rollbook.policies.http import Endpoint
from rollbook.rollouts.types import RolloutFailure


class Server:
    """Knows its requests by the connection they came over."""

    def __init__(self) -> None:
        self.requests: Counter[int] = Counter()
        self.has_begun = asyncio.Event()

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        asked = (await request.json())["do"]
        assert request.transport is not None
        self.requests[id(request.transport)] += 1
        if asked == "hang":
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(b"the first half")
            self.has_begun.set()
            await asyncio.sleep(60)
        return web.json_response({}, status=503 if asked == "fail" else 200)


async def _asked_in_turn(*bodies: str) -> Counter[int]:
    server = Server()
    async with serving(server) as url:
        endpoint = Endpoint(url)
        for body in bodies:
            posting = asyncio.ensure_future(endpoint.post({"do": body}))
            if body == "hang":
                await server.has_begun.wait()
                posting.cancel()
            with suppress(RolloutFailure, asyncio.CancelledError):
                await posting
        await endpoint.close()
    return server.requests


def test_a_connection_is_used_again_after_an_answer_of_either_kind() -> None:
    requests = asyncio.run(_asked_in_turn("one", "two", "fail", "three"))
    assert list(requests.values()) == [4]


def test_a_connection_with_half_an_answer_on_it_is_not_used_again() -> None:
    requests = asyncio.run(_asked_in_turn("one", "hang", "two", "three"))
    assert list(requests.values()) == [2, 2]
