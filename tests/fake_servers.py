"""Servers that a test talks to: one that answers as told, and one that breaks HTTP as told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Told:
    """Answers every POST with the same thing, and remembers what it was asked."""

    def __init__(self, body: Any = None, *, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.body, self.status, self.headers = body, status, headers
        self.asked: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.request_headers: list[dict[str, str]] = []

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        self.paths.append(request.path)
        self.request_headers.append(dict(request.headers))
        self.asked.append(await request.json())
        body = self.body(self.asked[-1]) if callable(self.body) else self.body
        if isinstance(body, bytes):
            return web.Response(body=body, status=self.status, headers=self.headers)
        return web.json_response(body, status=self.status, headers=self.headers)


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    """The base URL of a server that gives every request to `handler`."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return await handler(request)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}/v1"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def serving_bytes(answer: bytes | None) -> AsyncIterator[str]:
    """A server that reads a little, sends these bytes as they are, and hangs up; None: it never answers."""
    connections: set[asyncio.StreamWriter] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(writer)
        await reader.read(100)
        if answer is None:
            return
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    try:
        yield f"http://{host}:{port}/v1"
    finally:
        server.close()
        for writer in connections:
            writer.close()


def chat_answer(text: str = "", **message: Any) -> dict[str, Any]:
    """The least a chat server answers."""
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": text, **message},
    }
    return {"id": "c1", "object": "chat.completion", "model": "served", "choices": [choice]}
