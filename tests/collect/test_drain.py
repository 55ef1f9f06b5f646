"""Draining: nothing new is started, what is in flight may finish, and somebody is told of it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from pathlib import Path

import orjson
import pytest

from collecting import (
    PATIENCE,
    assert_exactly_once,
    command,
    config,
    expected_keys,
    keys,
    results,
    row,
    run,
    script,
    settings,
    small_input,
    start,
    write_rows,
)
from fake_servers import serving_bytes
from rollbook.errors import UsageError
from rollbook.records.progress import read_progress

# Rows that ask for it are never done.
HANGS = """
here = pathlib.Path(__file__).parent
if request.messages[0]["content"] == "hang" and not (here / "answers").exists():
    (here / f"{id(request)}_{os.getpid()}.hangs").touch()
    await asyncio.sleep(3600)
return "2"
"""


def lines_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_a_drain_ends_in_order_though_the_server_hangs(tmp_path: Path) -> None:
    small_input(tmp_path, 9)

    async def collected() -> subprocess.CompletedProcess[str]:
        async with serving_bytes(None) as url:
            config(tmp_path, {"kind": "openai", "base_url": url, "model": "m"})
            words = ("stop_after=0.3s", "drain_for=0.2s", "num_samples_in_parallel=4")
            return await asyncio.to_thread(command, tmp_path, *words)

    ended = asyncio.run(collected())
    assert ended.returncode == 3, ended.stderr
    assert "stop_after=0.3s is over: starting no new rollouts, waiting for 4 in flight\n" in ended.stderr
    assert "drain_for=0.2s is over: abandoned 4 rollouts in flight\n" in ended.stderr
    assert "stop_after=0.3s is over, 4 abandoned 0.2s later; rerun the same command to resume" in ended.stdout
    progress = read_progress(tmp_path / "out_progress.json")
    assert (progress.status, progress.in_flight, progress.missing, progress.failures) == (
        "interrupted",
        0,
        9,
        {},
    )
    assert progress.reason == "stop_after=0.3s is over, 4 abandoned 0.2s later"
    assert (tmp_path / "out_failures.ndjson").read_bytes() == b""


@pytest.mark.parametrize("workers", [1, 2])
def test_what_a_drain_let_go_is_collected_by_the_next_session(workers: int, tmp_path: Path) -> None:
    small_input(tmp_path, 4)
    rows = (tmp_path / "in.jsonl").read_bytes().splitlines(keepends=True)
    asked = b"What is 1 + 1?"
    (tmp_path / "in.jsonl").write_bytes(
        b"".join(rows[:2] + [row.replace(asked, b"hang") for row in rows[2:]])
    )
    config(tmp_path, script(tmp_path, HANGS))
    process = start(tmp_path, "drain_for=0.05s", f"workers={workers}")
    while lines_in(tmp_path / "out.jsonl") < 2 or len(list(tmp_path.glob("*.hangs"))) < 2:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 3, said
    assert "SIGTERM: starting no new rollouts" in said
    progress = read_progress(tmp_path / "out_progress.json")
    assert (progress.status, progress.reason) == ("interrupted", "SIGTERM received, 2 abandoned 0.05s later")
    assert sorted(keys(tmp_path / "out.jsonl")) == ["t0#0", "t1#0"]
    assert orjson.loads((tmp_path / "out_manifest.json").read_bytes())["coverage"]["missing"] == 2
    (tmp_path / "answers").touch()
    assert run(tmp_path).done_before == 2
    assert_exactly_once(tmp_path / "out.jsonl", expected_keys(4))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_rollout_that_takes_too_long_is_a_failure_of_its_own(workers: int, tmp_path: Path) -> None:
    rows = [row("t0", "hang"), row("t1")]
    write_rows(tmp_path / "in.jsonl", rows)
    config(tmp_path, script(tmp_path, HANGS))
    progress = run(tmp_path, "rollout_timeout_s=0.1", "retry.timeout=1", f"workers={workers}")
    assert (progress.failures, progress.done) == ({"timeout": 1}, 1)
    (failure,) = results(tmp_path / "out_failures.ndjson")
    assert "took longer than 0.1 s" in failure["message"]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_call_that_takes_too_long_is_a_failure_that_names_it(workers: int, tmp_path: Path) -> None:
    rows = [row("t0", "hang"), row("t1")]
    write_rows(tmp_path / "in.jsonl", rows)
    config(tmp_path, script(tmp_path, HANGS))
    progress = run(tmp_path, "call_timeout_s=0.1", "retry.timeout=1", f"workers={workers}")
    assert (progress.failures, progress.done) == ({"timeout": 1}, 1)
    (failure,) = results(tmp_path / "out_failures.ndjson")
    assert failure["message"] == "ScriptedPolicy.act took longer than 0.1 s"
    assert "reward" not in failure


def test_a_drain_for_too_many_failures_ends_in_time_too(tmp_path: Path) -> None:
    write_rows(tmp_path / "in.jsonl", [row("t0", "hang"), *(row(f"t{n}", "fail") for n in range(1, 9))])
    body = HANGS.replace('return "2"', 'raise ValueError("no")')
    config(tmp_path, script(tmp_path, body))
    words = ("retry.bad_answer=1", "min_samples=4", "num_samples_in_parallel=2", "drain_for=0.1s")
    progress = run(tmp_path, *words)
    assert (progress.status, progress.done) == ("failed", 0)
    assert "rollouts failed, more than max_failure_rate" in (progress.reason or "")
    assert (progress.reason or "").endswith(", 1 abandoned 0.1s later")


def test_a_drain_that_is_done_in_time_lets_nothing_go(tmp_path: Path) -> None:
    small_input(tmp_path, 1000)
    config(tmp_path, script(tmp_path, "await asyncio.sleep(0.02)\nreturn '2'"))
    said: list[str] = []
    words = ("stop_after=0.2s", "drain_for=1h", "num_samples_in_parallel=4")
    progress = run(tmp_path, *words, said=said)
    assert said == ["stop_after=0.2s is over: starting no new rollouts, waiting for 4 in flight"]
    assert (progress.status, progress.reason) == ("interrupted", "stop_after=0.2s is over")


@pytest.mark.parametrize("name", ["stop_after", "drain_for"])
@pytest.mark.parametrize("value", ["90", "soon"])
def test_a_time_that_is_no_duration_is_refused_by_its_name(name: str, value: str, tmp_path: Path) -> None:
    config(tmp_path)
    with pytest.raises(UsageError, match=rf"{name}.*: '{value}' is not a duration; write "):
        settings(tmp_path, f"{name}={value}")


NEVER_CLOSES = """
import asyncio
from rollbook.envs.base import Environment
from rollbook.rollouts.types import Feedback


class Own(Environment):
    def step(self, message):
        return Feedback(reward=1.0)

    async def close(self):
        await asyncio.sleep(3600)
"""


def test_an_environment_that_does_not_close_is_left_at_it(tmp_path: Path) -> None:
    small_input(tmp_path, 2)
    (tmp_path / "own.py").write_text(NEVER_CLOSES)
    policy = script(tmp_path, "await asyncio.sleep(3600)")
    agent = {"env": {"name": f"{tmp_path / 'own.py'}:Own"}, "policy": policy}
    (tmp_path / "rollbook.yaml").write_text(orjson.dumps({"agents": {"a": agent}}).decode())
    ended = command(tmp_path, "stop_after=0.2s", "drain_for=0.1s")
    assert ended.returncode == 3, ended.stderr
    assert read_progress(tmp_path / "out_progress.json").status == "interrupted"


def test_a_signal_is_heard_though_nobody_reads_what_is_said(tmp_path: Path) -> None:
    small_input(tmp_path, 400)
    config(tmp_path, script(tmp_path, "await asyncio.sleep(0.05)\nreturn '2'"))
    process = start(tmp_path, "num_samples_in_parallel=2")
    assert process.stderr is not None
    while lines_in(tmp_path / "out.jsonl") < 4:
        assert process.poll() is None
        time.sleep(0.01)
    process.stderr.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 3
    progress = read_progress(tmp_path / "out_progress.json")
    assert progress.status == "interrupted"
    assert len(keys(tmp_path / "out.jsonl")) == progress.done < 400


def test_what_fails_while_draining_is_counted(tmp_path: Path) -> None:
    small_input(tmp_path, 4)
    late = "await asyncio.sleep(0.5)\nfrom rollbook.rollouts.types import FailureKind, RolloutFailure\n"
    policy = script(tmp_path, f"{late}raise RolloutFailure(FailureKind.SERVER_ERROR, 'no')")
    config(tmp_path, policy)
    progress = run(tmp_path, "stop_after=0.1s", "num_samples_in_parallel=3")
    assert (progress.failures, progress.failed) == ({"server_error": 3}, 0)
