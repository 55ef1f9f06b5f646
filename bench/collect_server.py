"""An OpenAI-compatible server that answers at once, so that a benchmark measures its clients.

A bare protocol on uvloop that answers every POST with the same bytes: a chat completion of about 200 tokens
whose last word is a number. It prints its port, and `GET /stats` gives and forgets when the first and the
last request came, on the machine's monotonic clock, and how many there were.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import cast

import uvloop

_PHRASE = "first we add the tens then the ones and carry what is over to the left as usual "


def completion() -> bytes:
    text = 11 * _PHRASE + "so the answer is 42"  # 203 words
    message = {"role": "assistant", "content": text, "refusal": None, "tool_calls": None}
    answer = {
        "id": "chatcmpl-0123456789abcdef",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "instant",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 24, "completion_tokens": 200, "total_tokens": 224},
    }
    return json.dumps(answer).encode()


def http(body: bytes) -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


_ANSWER = http(completion())


class Stats:
    first = last = 0.0
    count = 0

    def take(self) -> bytes:
        body = json.dumps({"first": self.first, "last": self.last, "count": self.count}).encode()
        self.first = self.last = 0.0
        self.count = 0
        return http(body)


class Instant(asyncio.Protocol):
    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's is no subclass of it

    def data_received(self, data: bytes) -> None:
        self._rest = data = self._rest + data if self._rest else data
        head = data.find(b"\r\n\r\n")
        if head < 0:
            return
        if data.startswith(b"GET"):
            self._rest = b""
            self._transport.write(self._stats.take())
            return
        if len(data) < head + 4 + _length(data[:head].lower()):
            return
        self._rest = b""
        stats = self._stats
        stats.last = time.monotonic()
        stats.first = stats.first or stats.last
        stats.count += 1
        self._transport.write(_ANSWER)


def _length(head: bytes) -> int:
    place = head.index(b"content-length:") + 15
    end = head.find(b"\r\n", place)
    return int(head[place : end if end >= 0 else None])


async def serve() -> None:
    loop, stats = asyncio.get_running_loop(), Stats()
    server = await loop.create_server(lambda: Instant(stats), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)  # until whoever started us closes it


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())
