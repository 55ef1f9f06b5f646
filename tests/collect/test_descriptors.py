"""More rollouts in flight than files may be open."""

from __future__ import annotations

import asyncio
import resource
import subprocess
from pathlib import Path

import pytest
from aiohttp import web

from collecting import COLLECT, PATIENCE, assert_exactly_once, config, expected_keys, small_input, words
from fake_servers import chat_answer, serving


async def collected(directory: Path, *more: str, soft: int, hard: int) -> tuple[str, int]:
    """What the command said under these limits, and the most requests that were in flight."""
    flying = most = 0

    async def answer(_: web.Request) -> web.StreamResponse:
        nonlocal flying, most
        flying += 1
        most = max(most, flying)
        await asyncio.sleep(0.2)
        flying -= 1
        return web.json_response(chat_answer("2"))

    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    async with serving(answer) as url:
        config(directory, {"kind": "openai", "base_url": url, "model": "m"})
        command = [*COLLECT, *words(directory, *more)]
        done = await asyncio.to_thread(
            subprocess.run,
            command,
            preexec_fn=lower,
            stderr=subprocess.PIPE,
            timeout=PATIENCE,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    return done.stderr, most


@pytest.mark.parametrize(("soft", "hard", "in_flight"), [(80, 80, 16), (80, 400, 128)])
def test_no_more_are_in_flight_than_files_may_be_open(
    soft: int, hard: int, in_flight: int, tmp_path: Path
) -> None:
    small_input(tmp_path, 150)
    said, most = asyncio.run(collected(tmp_path, soft=soft, hard=hard))
    assert_exactly_once(tmp_path / "out.jsonl", expected_keys(150))
    assert most <= in_flight
    assert (f"=128 is lowered to {in_flight}: " in said) is (soft == hard)
    assert "failure" not in said
