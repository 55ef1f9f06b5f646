"""Servers that do not count tokens: what nobody counted is unknown, and never a zero that looks real."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import orjson
import pytest
import yaml

from collecting import PATIENCE, ROLLBOOK, command, config, results, run, script, small_input
from fake_servers import Told, chat_answer, serving
from rollbook.records.progress import Progress, read_progress

PRICES = ("prices.input=10", "prices.output=100")
COUNTED = {"prompt_tokens": 5, "completion_tokens": 3}
BY_PARITY = """
from rollbook.records.turns import Usage
from rollbook.rollouts.types import Completion
counted = Usage(input_tokens=5, output_tokens=3) if request.turn % 2 == 0 else Usage()
return Completion({"role": "assistant", "content": "2"}, usage=counted)
"""
TWO_TURNS = """
from rollbook.envs import Environment, Feedback

class Twice(Environment):
    turn = 0

    def step(self, message):
        self.turn += 1
        more = [{"role": "user", "content": "and then?"}]
        return Feedback(done=self.turn == 2, messages=more if self.turn == 1 else [])
"""


def with_server(directory: Path, usage: Any, ask: Callable[[], Any]) -> Any:
    """What `ask` returns while a server is up, in a thread of its own, that answers with this usage."""
    urls: Queue[str] = Queue()
    loop, ended = asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        async with serving(Told(chat_answer("2") | {"usage": usage})) as url:
            urls.put(url)
            await ended.wait()

    thread = Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    try:
        config(directory, {"kind": "openai", "base_url": urls.get(timeout=PATIENCE), "model": "m"})
        return ask()
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()


def collected(directory: Path, usage: Any, *words: str) -> Progress:
    progress: Progress = with_server(directory, usage, lambda: run(directory, *PRICES, *words))
    return progress


def said_by(*arguments: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [*ROLLBOOK, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def usages(directory: Path) -> list[Any]:
    return [result["response"]["usage"] for result in results(directory / "out.jsonl")]


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": 0, "completion_tokens": 0}, "none"])
def test_usage_that_a_server_did_not_send_is_null(usage: Any, tmp_path: Path) -> None:
    small_input(tmp_path, 3)
    progress = collected(tmp_path, usage)
    assert usages(tmp_path) == [None] * 3
    assert (progress.done, progress.without_usage, progress.cost) == (3, 3, None)
    assert read_progress(tmp_path / "out_progress.json").without_usage == 3


def test_usage_that_a_server_sent_is_counted(tmp_path: Path) -> None:
    small_input(tmp_path, 2)
    progress = collected(tmp_path, COUNTED)
    assert [usage["total_tokens"] for usage in usages(tmp_path)] == [8, 8]
    assert (progress.without_usage, progress.input_tokens, progress.output_tokens) == (0, 10, 6)
    assert progress.cost == pytest.approx(0.0007)


def test_rollouts_without_usage_are_those_of_all_sessions(tmp_path: Path) -> None:
    small_input(tmp_path, 5)
    assert collected(tmp_path, None, "limit=2").without_usage == 2
    progress = collected(tmp_path, COUNTED)
    assert (progress.done_before, progress.without_usage, progress.output_tokens) == (2, 2, 9)
    assert progress.cost is not None


def test_workers_tell_of_rollouts_without_usage(tmp_path: Path) -> None:
    small_input(tmp_path, 4)
    assert collected(tmp_path, None, "workers=2").without_usage == 4


def test_usage_of_an_episode_with_an_uncounted_turn_is_unknown(tmp_path: Path) -> None:
    small_input(tmp_path, 3)
    (tmp_path / "env.py").write_text(TWO_TURNS)
    agent = {"env": {"name": f"{tmp_path / 'env.py'}:Twice"}, "policy": script(tmp_path, BY_PARITY)}
    (tmp_path / "rollbook.yaml").write_text(yaml.safe_dump({"agents": {"a": agent}}))
    first = run(tmp_path, "limit=1")
    assert (first.without_usage, first.input_tokens) == (1, 0)
    progress = run(tmp_path)
    assert (progress.done_before, progress.without_usage) == (1, 3)
    assert (progress.input_tokens, progress.output_tokens) == (0, 0)
    assert usages(tmp_path) == [None] * 3
    steps = results(tmp_path / "out.jsonl")[0]["_rb_steps"]
    assert [(step["ob_len"], step["ac_len"]) for step in steps] == [(5, 3), (None, None)]


def test_summary_and_status_say_what_tokens_and_cost_leave_out(tmp_path: Path) -> None:
    small_input(tmp_path, 2)
    done = with_server(tmp_path, None, lambda: command(tmp_path, *PRICES))
    assert "(without 2 rollouts whose answers came without usage)" in done.stdout
    assert "0 out (without 2 rollouts" in done.stderr
    status = said_by("status", "out.jsonl", cwd=tmp_path)
    assert "0 tokens in, 0 out (without 2 rollouts" in status
    assert "cost" not in status
    done = with_server(tmp_path, None, lambda: command(tmp_path, *PRICES, "--json"))
    assert json.loads(done.stdout)["without_usage"] == 2


def test_nothing_is_said_of_usage_where_all_is_counted(tmp_path: Path) -> None:
    small_input(tmp_path, 2)
    done = with_server(tmp_path, COUNTED, lambda: command(tmp_path, *PRICES))
    assert "without usage" not in done.stdout
    assert "without usage" not in said_by("status", "out.jsonl", cwd=tmp_path)


def test_a_progress_file_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    small_input(tmp_path, 1)
    collected(tmp_path, COUNTED)
    path = tmp_path / "out_progress.json"
    earlier = orjson.loads(path.read_bytes())
    del earlier["without_usage"]
    for word, now in (("complete", "completed"), ("incomplete", "failed"), ("stopped", "interrupted")):
        path.write_bytes(orjson.dumps({**earlier, "status": word}))
        progress = read_progress(path)
        assert progress is not None and (progress.without_usage, progress.status) == (0, now)


@pytest.mark.parametrize(("rest", "counted", "tokens"), [(None, 0, None), (COUNTED, 2, 6)])
def test_readers_of_rows_take_usage_that_is_null(
    rest: Any, counted: int, tokens: int | None, tmp_path: Path
) -> None:
    small_input(tmp_path, 4)
    collected(tmp_path, None, "limit=2")
    collected(tmp_path, rest)
    asked = "select count(output_tokens) as counted, sum(output_tokens) as tokens from rollouts"
    (found,) = json.loads(said_by("query", asked, "out.jsonl", "--json", cwd=tmp_path))
    assert found == {"counted": counted, "tokens": tokens}
    stats = json.loads(said_by("data", "stats", "out.jsonl", "--json", cwd=tmp_path))
    assert stats["rows"] == 4
    said_by("data", "sft", "out.jsonl", "-o", "train.jsonl", cwd=tmp_path)
    assert len((tmp_path / "train.jsonl").read_bytes().splitlines()) == 4


FAILS_ON_THE_SECOND_TURN = """
from rollbook.envs import Environment, Feedback

class Fragile(Environment):
    turn = 0

    def step(self, message):
        self.turn += 1
        if self.turn == 2:
            raise OSError("the tool broke")
        return Feedback(done=False, messages=[{"role": "user", "content": "and then?"}])
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_what_failed_attempts_used_is_counted_and_paid_for(tmp_path: Path, workers: int) -> None:
    small_input(tmp_path, 2)
    (tmp_path / "own.py").write_text(FAILS_ON_THE_SECOND_TURN)
    body = BY_PARITY.replace("if request.turn % 2 == 0 else Usage()", "")
    agent = {"env": {"name": f"{tmp_path}/own.py:Fragile"}, "policy": script(tmp_path, body)}
    (tmp_path / "rollbook.yaml").write_text(yaml.safe_dump({"agents": {"a": agent}}))
    retry = ("retry.environment=3", "retry.first_wait_s=0", f"workers={workers}")
    ended = command(tmp_path, *PRICES, *retry)
    assert ended.returncode == 3, ended.stderr
    progress = read_progress(tmp_path / "out_progress.json")
    assert (progress.done, progress.input_tokens, progress.output_tokens) == (0, 0, 0)
    attempts = 2 * 3
    assert progress.failures == {"environment": attempts}
    assert (progress.lost_input_tokens, progress.lost_output_tokens) == (attempts * 2 * 5, attempts * 2 * 3)
    assert progress.cost == pytest.approx((60 * 10 + 36 * 100) / 1e6)
    failed = results(tmp_path / "out_failures.ndjson")
    used = [(tried["input_tokens"], tried["output_tokens"]) for one in failed for tried in one["attempts"]]
    assert used == [(10, 6)] * attempts
    shown = subprocess.run(
        [*ROLLBOOK, "status", str(tmp_path / "out.jsonl")], capture_output=True, text=True, check=False
    )
    assert "lost:       60 in, 36 out, in attempts that failed" in shown.stdout


FAILS_ONCE = """
import pathlib
from rollbook.envs import single_turn

@single_turn
def own(task, answer):
    tried = pathlib.Path(__file__).with_name(task.id)
    if tried.exists() or task.id == "t0":
        return 1.0
    tried.touch()
    raise OSError("the tool broke")
"""


def fails_once(directory: Path) -> None:
    """Two rows, of which the first is done by the first session, the second by the next one."""
    small_input(directory, 2)
    (directory / "own.py").write_text(FAILS_ONCE)
    body = BY_PARITY.replace("if request.turn % 2 == 0 else Usage()", "")
    agent = {"env": {"name": f"{directory}/own.py:own"}, "policy": script(directory, body)}
    (directory / "rollbook.yaml").write_text(yaml.safe_dump({"agents": {"a": agent}}))


def test_what_failed_attempts_of_earlier_sessions_used_is_still_paid_for(tmp_path: Path) -> None:
    fails_once(tmp_path)
    first, second, third = (run(tmp_path, *PRICES) for _ in range(3))
    assert [(one.done, one.failed) for one in (first, second, third)] == [(1, 1), (2, 0), (2, 0)]
    for progress in (first, second, third, read_progress(tmp_path / "out_progress.json")):
        assert (progress.lost_input_tokens, progress.lost_output_tokens) == (5, 3)
    assert (second.cost, third.cost) == (pytest.approx(3 * (5 * 10 + 3 * 100) / 1e6),) * 2


def test_what_a_first_session_used_that_wrote_no_line_is_paid_for_too(tmp_path: Path) -> None:
    fails_once(tmp_path)
    rows = (tmp_path / "in.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "in.jsonl").write_bytes(rows[1])
    first, second = (run(tmp_path, *PRICES) for _ in range(2))
    assert [(one.done, one.lost_output_tokens) for one in (first, second)] == [(0, 3), (1, 3)]


@pytest.mark.parametrize("of_another", [True, False])
def test_progress_that_says_nothing_of_this_output_is_not_counted(of_another: bool, tmp_path: Path) -> None:
    fails_once(tmp_path)
    run(tmp_path, *PRICES)
    path = tmp_path / "out_progress.json"
    other = orjson.dumps(orjson.loads(path.read_bytes()) | {"output": "out.json"})
    path.write_bytes(other if of_another else b"{")
    assert run(tmp_path, *PRICES).lost_output_tokens == 0


def test_a_collection_that_begins_anew_has_lost_nothing_yet(tmp_path: Path) -> None:
    fails_once(tmp_path)
    run(tmp_path, *PRICES)
    (tmp_path / "out.jsonl").unlink()
    assert run(tmp_path, *PRICES).lost_output_tokens == 0
