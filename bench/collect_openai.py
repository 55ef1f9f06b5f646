"""The same requests by the `openai` package's async client on uvloop; nothing graded or kept.

python collect_openai.py URL INPUT IN_FLIGHT
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import uvloop


def prompts(path: Path) -> Iterator[list[dict[str, str]]]:
    with path.open("rb") as file:
        for line in file:
            yield json.loads(line)["responses_create_params"]["input"]


async def client(api: openai.AsyncOpenAI, rows: Iterator[list[dict[str, str]]]) -> None:
    for messages in rows:
        answer = await api.chat.completions.create(model="instant", messages=messages)
        assert answer.choices[0].message.content


async def main(base_url: str, path: Path, in_flight: int) -> None:
    rows = prompts(path)
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none") as api:
        await asyncio.gather(*(client(api, rows) for _ in range(in_flight)))


if __name__ == "__main__":
    if sys.argv[1:] == ["--version"]:
        print(f"openai {openai.__version__}")
    else:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
