"""A judge that fails is asked again about the same reply: the policy is not made to pay for it."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from collecting import command, results, script, small_input
from fake_servers import Handler, chat_answer, serving
from rollbook.records.progress import read_progress

# Every reply is another one, and leaves a trace.
ACT = """
from rollbook.records.turns import Usage
from rollbook.rollouts.types import Completion
name = os.urandom(4).hex()
(pathlib.Path(__file__).parent / "asked" / name).touch()
return Completion({"role": "assistant", "content": name}, usage=Usage(input_tokens=5, output_tokens=3))
"""
RETRY = ("retry.first_wait_s=0", "prices.input=10", "prices.output=100")


def collect_with(judge: Handler, directory: Path, *words: str) -> int:
    (directory / "asked").mkdir()
    small_input(directory, 4)

    async def play() -> int:
        async with serving(judge) as url:
            env = {"name": "dataset", "grader": "judge", "judge": {"base_url": url, "model": "j"}}
            agent = {"env": env, "policy": script(directory, ACT)}
            (directory / "rollbook.yaml").write_text(yaml.safe_dump({"agents": {"a": agent}}))
            return (await asyncio.to_thread(command, directory, *RETRY, *words)).returncode

    return asyncio.run(play())


class Late:
    """A judge that finds its words, for each answer, after some failures of different kinds."""

    def __init__(self, failures: int) -> None:
        self._failures = failures
        self._asked: Counter[str] = Counter()

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        asked: dict[str, Any] = await request.json()
        answer = re.sub(r"=== \w+ ===", "", asked["messages"][0]["content"])  # a new fence each time
        self._asked[answer] += 1
        if self._asked[answer] > self._failures:
            return web.json_response(chat_answer("VERDICT: CORRECT"))
        if self._asked[answer] % 2:
            return web.json_response({"error": "busy"}, status=500)
        return web.json_response(chat_answer("I would rather not say."))


@pytest.mark.parametrize("workers", [1, 2])
def test_the_reply_is_kept_while_the_judge_fails(workers: int, tmp_path: Path) -> None:
    assert collect_with(Late(3), tmp_path, f"workers={workers}") == 0
    replies = {path.name for path in (tmp_path / "asked").iterdir()}
    said = {row["response"]["output"][0]["content"][0]["text"] for row in results(tmp_path / "out.jsonl")}
    assert said == replies
    assert len(replies) == 4  # one a row
    progress = read_progress(tmp_path / "out_progress.json")
    assert progress.failures == {"judge": 4 * 3}
    assert (progress.output_tokens, progress.lost_output_tokens) == (4 * 3, 0)


def test_a_reply_that_nobody_judges_is_lost_and_paid_for(tmp_path: Path) -> None:
    assert collect_with(Late(99), tmp_path, "retry.judge=3") == 3
    replies = {path.name for path in (tmp_path / "asked").iterdir()}
    assert len(replies) == 4
    failed = results(tmp_path / "out_failures.ndjson")
    assert {record["response"]["output"][0]["content"][0]["text"] for record in failed} == replies
    progress = read_progress(tmp_path / "out_progress.json")
    assert (progress.done, progress.failed, progress.failures) == (0, 4, {"judge": 12})
    assert (progress.lost_input_tokens, progress.lost_output_tokens) == (4 * 5, 4 * 3)
    assert progress.cost == pytest.approx(4 * (5 * 10 + 3 * 100) / 1e6)
