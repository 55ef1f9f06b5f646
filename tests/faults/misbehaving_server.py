"""A chat server that does everything a server can do wrong, each fault as often as it is told.

Faults: `429` (with Retry-After), `500`, `garbage` (200 and no JSON), `other` (200 and JSON of another shape),
`half` (half a body), `nothing` (200 and no body), `close` (hangs up at once), `hang` (never answers). A task
meets each fault at most once, in an order of its own, so that budgets of retries can be reasoned about.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence

from aiohttp import web

FAULTS = ("429", "500", "garbage", "other", "half", "nothing", "close", "hang")


class MisbehavingServer:
    """`faults` are shuffled for each question; when they are used up, it is answered."""

    def __init__(self, faults: Sequence[str] = FAULTS, *, retry_after: str = "0.05", seed: int = 0) -> None:
        self._faults = tuple(faults)
        self._retry_after = retry_after
        self._chance = random.Random(seed)
        self._left: dict[str, list[str]] = {}
        self.seen: Counter[str] = Counter()
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        question = (await request.json())["messages"][-1]["content"]
        left = self._left.setdefault(
            question, self._chance.sample(self._faults, len(self._faults)) if self._faults else []
        )
        fault = left.pop() if left else "answer"
        self.seen[fault] += 1
        return await self._do(fault, request)

    async def _do(self, fault: str, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        match fault:
            case "429":
                return web.Response(status=429, headers={"Retry-After": self._retry_after}, text="slow down")
            case "500":
                return web.Response(status=500, text="<h1>Oops\r\n</h1>")
            case "garbage":
                return web.Response(body=b"\x00\xff<html>")
            case "other":
                return web.json_response({"detail": "it is complicated"})
            case "nothing":
                return web.Response(body=b"")
            case "half":
                response = web.StreamResponse(headers={"Content-Length": "1000"})
                await response.prepare(request)
                await response.write(b'{"choices": [{"message": {"content": "2')
                request.transport.close()
                return response
            case "close":
                request.transport.close()
                return web.Response()
            case "hang":
                await asyncio.sleep(3600)
        message = {"role": "assistant", "content": "2"}
        usage = {"prompt_tokens": 7, "completion_tokens": 1}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return web.json_response({"id": "c", "model": "m", "choices": [choice], "usage": usage})

    @contextlib.contextmanager
    def serving(self) -> Iterator[MisbehavingServer]:
        """Serve from a thread with a loop of its own."""
        ready, loop = threading.Event(), asyncio.new_event_loop()

        async def start() -> web.AppRunner:
            app = web.Application()
            app.router.add_post("/v1/chat/completions", self.handle)
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            host, port = runner.addresses[0][:2]
            self.url = f"http://{host}:{port}/v1"
            return runner

        async def stop(runner: web.AppRunner) -> None:
            await runner.cleanup()
            hanging = asyncio.all_tasks() - {asyncio.current_task()}
            for task in hanging:
                task.cancel()
            await asyncio.gather(*hanging, return_exceptions=True)

        def serve() -> None:
            asyncio.set_event_loop(loop)
            runner = loop.run_until_complete(start())
            ready.set()
            loop.run_forever()
            loop.run_until_complete(stop(runner))
            loop.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        ready.wait()
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
