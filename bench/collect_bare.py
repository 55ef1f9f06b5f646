"""The floor of what a client costs: aiohttp on uvloop, the answer's body parsed, nothing graded or kept.

python collect_bare.py URL INPUT IN_FLIGHT
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import orjson
import uvloop


def bodies(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        for line in file:
            messages = orjson.loads(line)["responses_create_params"]["input"]
            yield orjson.dumps({"model": "instant", "messages": messages})


async def client(session: aiohttp.ClientSession, url: str, rows: Iterator[bytes]) -> None:
    headers = {"Content-Type": "application/json"}
    for body in rows:
        async with session.post(url, data=body, headers=headers) as response:
            answer = orjson.loads(await response.read())
            assert answer["choices"][0]["message"]["content"]


async def main(base_url: str, path: Path, in_flight: int) -> None:
    rows = bodies(path)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        url = f"{base_url}/chat/completions"
        await asyncio.gather(*(client(session, url, rows) for _ in range(in_flight)))


if __name__ == "__main__":
    if sys.argv[1:] == ["--version"]:
        print(f"aiohttp {aiohttp.__version__}, uvloop {uvloop.__version__}")
    else:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
