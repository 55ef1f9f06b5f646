"""A server that answers at once, so that a benchmark measures its clients.

A bare protocol on uvloop that answers every POST with the same bytes: to `/run` what an agent server of
NeMo Gym says, a graded response, and to any other path an OpenAI-compatible chat completion. Both carry the
same text of about 200 tokens whose last word is a number. It prints its port. `GET /stats` gives and forgets
when the first and the last request came, on the machine's monotonic clock, and how many there were; any
other GET gets the configuration in which NeMo Gym's collector looks up where its agent `bench` listens.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
import time
from typing import cast

import uvloop

_PHRASE = "first we add the tens then the ones and carry what is over to the left as usual "
_TEXT = 11 * _PHRASE + "so the answer is 42"  # 203 words


def completion() -> bytes:
    message = {"role": "assistant", "content": _TEXT, "refusal": None, "tool_calls": None}
    answer = {
        "id": "chatcmpl-0123456789abcdef",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "instant",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 24, "completion_tokens": 200, "total_tokens": 224},
    }
    return json.dumps(answer).encode()


def verified() -> bytes:
    """What `/run` of an agent server returns: the request it made, the response, the reward."""
    content = {"type": "output_text", "text": _TEXT, "annotations": []}
    message = {"type": "message", "id": "msg-0", "role": "assistant", "status": "completed"}
    usage = {
        "input_tokens": 24,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 200,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 224,
    }
    response = {
        "id": "resp-0123456789abcdef",
        "object": "response",
        "created_at": 1700000000.0,
        "model": "instant",
        "status": "completed",
        "output": [message | {"content": [content]}],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "incomplete_details": None,
        "error": None,
        "usage": usage,
    }
    question = {"role": "user", "content": "What is 20 + 22? Answer with the number only."}
    answer = {
        "responses_create_params": {"input": [question]},
        "response": response,
        "reward": 1.0,
        "expected_answer": "42",
    }
    return json.dumps(answer).encode()


def agents(port: int) -> bytes:
    agent = {"host": "127.0.0.1", "port": port, "entrypoint": "app.py"}
    return json.dumps({"bench": {"responses_api_agents": {"instant": agent}}}).encode()


def http(body: bytes, status: str = "200 OK") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


_COMPLETION, _VERIFIED = http(completion()), http(verified())
_BUSY = http(b"{}", "429 Too Many Requests")
_ERRORS = [_BUSY, http(b"{}", "500 Internal Server Error"), http(b"{}", "503 Service Unavailable")]


class Stats:
    first = last = 0.0
    count = refused = 0
    port = 0

    def take(self) -> bytes:
        taken = {"first": self.first, "last": self.last, "count": self.count, "refused": self.refused}
        self.first = self.last = 0.0
        self.count = self.refused = 0
        return http(json.dumps(taken).encode())


class Trouble:
    """What keeps a request from being answered at once."""

    def __init__(self, latency_s: float = 0.0, errors: float = 0.0, room: int = sys.maxsize) -> None:
        self.latency_s, self._errors, self._room = latency_s, errors, room
        self._chance, self._next = random.Random(1), itertools.cycle(_ERRORS)
        self.now = 0

    def refusal(self) -> bytes | None:
        if self.now >= self._room:
            return _BUSY
        return next(self._next) if self._errors and self._chance.random() < self._errors else None


class Instant(asyncio.Protocol):
    def __init__(self, stats: Stats, trouble: Trouble) -> None:
        self._stats, self._trouble = stats, trouble
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
            wants_stats = b"/stats " in data[: data.index(b"\r\n")]
            self._transport.write(self._stats.take() if wants_stats else http(agents(self._stats.port)))
            return
        if len(data) < head + 4 + _length(data[:head].lower()):
            return
        self._rest = b""
        stats = self._stats
        stats.last = time.monotonic()
        stats.first = stats.first or stats.last
        stats.count += 1
        answer = _VERIFIED if data.startswith(b"POST /run ") else _COMPLETION
        if (refusal := self._trouble.refusal()) is not None:
            stats.refused += 1
            self._transport.write(refusal)
        elif self._trouble.latency_s:
            self._trouble.now += 1
            asyncio.get_running_loop().call_later(self._trouble.latency_s, self._answer, answer)
        else:
            self._transport.write(answer)

    def _answer(self, answer: bytes) -> None:
        self._trouble.now -= 1
        self._transport.write(answer)


def _length(head: bytes) -> int:
    place = head.index(b"content-length:") + 15
    end = head.find(b"\r\n", place)
    return int(head[place : end if end >= 0 else None])


async def serve(trouble: Trouble) -> None:
    loop, stats = asyncio.get_running_loop(), Stats()
    server = await loop.create_server(lambda: Instant(stats, trouble), "127.0.0.1", 0, backlog=4096)
    stats.port = server.sockets[0].getsockname()[1]
    print(stats.port, flush=True)
    await loop.run_in_executor(None, sys.stdin.read)  # until whoever started us closes it


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        given = sys.argv[1:]
        runner.run(serve(Trouble(float(given[0]), float(given[1]), int(given[2])) if given else Trouble()))
