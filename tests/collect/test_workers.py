"""Rollouts in several processes: the same results, and a worker's death costs only what it had in flight."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from collecting import (
    PATIENCE,
    assert_exactly_once,
    command,
    config,
    expected_keys,
    results,
    row,
    run,
    script,
    settings,
    small_input,
    start,
    write_rows,
)
from rollbook.collect import workers
from rollbook.collect.items import Answer, Item, decode_answer, encode_item
from rollbook.collect.ray_engine import RolloutActor
from rollbook.collect.settings import CollectSettings, encode_settings
from rollbook.errors import RollbookError, UsageError
from rollbook.records.progress import read_progress
from rollbook.rollouts.types import FailureKind
from supervision import is_alive


@pytest.fixture(autouse=True)
def _history_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLBOOK_ARTIFACTS", str(tmp_path / "artifacts"))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_workers_do_the_same(tmp_path: Path) -> None:
    small_input(tmp_path, 30)
    config(
        tmp_path, script(tmp_path, "print('noise on stdout')\nreturn {'content': '2', 'pid': os.getpid()}")
    )
    ended = command(tmp_path, "workers=2", "num_repeats=2")
    assert ended.returncode == 0, ended.stderr
    assert_exactly_once(tmp_path / "out.jsonl", expected_keys(30, 2))
    assert {line["reward"] for line in results(tmp_path / "out.jsonl")} == {1.0}
    assert "noise on stdout" not in ended.stdout


@pytest.mark.parametrize("workers", [2, 3])
def test_a_rollout_that_kills_its_workers_is_given_up_and_no_other(workers: int, tmp_path: Path) -> None:
    body = (
        "if 'deadly' in request.messages[0]['content']:\n    os._exit(9)\n"
        "await asyncio.sleep(0.05)\nreturn '2'"
    )
    deadly = {5, 6, 17}
    rows = [row(f"t{number}", "deadly" if number in deadly else "fine") for number in range(40)]
    write_rows(tmp_path / "in.jsonl", rows)
    config(tmp_path, script(tmp_path, body))
    progress = run(tmp_path, f"workers={workers}", "num_samples_in_parallel=32", "retry.worker_lost=2")
    failures = [orjson.loads(line) for line in (tmp_path / "out_failures.ndjson").read_bytes().splitlines()]
    assert {failure["_rb_key"] for failure in failures} == {f"t{number}#0" for number in deadly}
    assert {failure["kind"] for failure in failures} == {"worker_lost"}
    assert (progress.done, progress.failed) == (37, 3)
    assert_exactly_once(tmp_path / "out.jsonl", expected_keys(40) - {f"t{number}#0" for number in deadly})


@pytest.mark.parametrize("good", [0, 20])
def test_rows_that_kill_every_worker_do_not_keep_the_others_from_being_done(
    good: int, tmp_path: Path
) -> None:
    body = "if 'deadly' in request.messages[0]['content']:\n    os._exit(9)\nreturn '2'"
    rows = [row(f"t{number}", "deadly" if number < 6 else "fine") for number in range(6 + good)]
    write_rows(tmp_path / "in.jsonl", rows)
    config(tmp_path, script(tmp_path, body))
    progress = run(tmp_path, "workers=2", "num_samples_in_parallel=4", "retry.worker_lost=2")
    assert (progress.status, progress.done, progress.failed) == ("failed", good, 6)
    assert set(progress.failures) == {"worker_lost"}


def test_a_worker_that_leaves_a_process_behind_is_missed_when_it_dies(tmp_path: Path) -> None:
    """The process holds the worker's output open: its end alone would not be heard of."""
    pid = tmp_path / "left_behind"
    body = (
        f"left = pathlib.Path({str(pid)!r})\n"
        "if not left.exists():\n"
        "    child = os.fork()\n"
        "    if child == 0:\n        time.sleep(120)\n        os._exit(0)\n"
        "    left.write_text(str(child))\n    os._exit(9)\n"
        "return '2'"
    )
    small_input(tmp_path, 6)
    config(tmp_path, script(tmp_path, body))
    progress = run(tmp_path, "workers=2", "num_samples_in_parallel=4")
    os.kill(int(pid.read_text()), signal.SIGKILL)  # it is still there
    assert progress.done == 6
    assert progress.failures["worker_lost"] >= 1


def test_a_worker_that_hangs_before_it_begins_does_not_hold_up_the_others(tmp_path: Path) -> None:
    small_input(tmp_path, 6)
    policy = script(tmp_path, "return '2'")
    first = tmp_path / "first"
    with (tmp_path / "script.py").open("a") as file:
        file.write(
            "\nimport contextlib, sys\n"
            "if 'worker' in sys.argv[0]:\n"
            f"    with contextlib.suppress(FileExistsError):\n        os.mkdir({str(first)!r})\n"
            "        time.sleep(3600)\n"
        )
    config(tmp_path, policy)
    assert run(tmp_path, "workers=2", "stop_after=1h").done == 6


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent died")
def test_workers_do_not_outlive_a_collector_that_was_killed_while_they_hang(tmp_path: Path) -> None:
    small_input(tmp_path, 2)
    body = "(pathlib.Path(__file__).parent / f'{os.getpid()}.hangs').touch()\nwhile True:\n    time.sleep(1)"
    config(tmp_path, script(tmp_path, body))
    collector = start(tmp_path, "workers=2", "num_samples_in_parallel=2")
    until(lambda: len(list(tmp_path.glob("*.hangs"))) == 2)
    workers = [int(path.stem) for path in tmp_path.glob("*.hangs")]
    collector.kill()
    collector.wait()
    try:
        until(lambda: not any(map(is_alive, workers)))
    finally:
        for pid in filter(is_alive, workers):
            os.kill(pid, signal.SIGKILL)
        collector.communicate()  # which waits for all who hold its output


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent died")
def test_a_worker_whose_collector_was_gone_before_it_began_ends_at_once() -> None:
    gone = [sys.executable, "-m", "rollbook.collect.worker_main", str(os.getppid())]
    ended = subprocess.run(
        gone, stdin=subprocess.PIPE, capture_output=True, text=True, check=False, timeout=60
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "the collector of this worker is gone" in ended.stderr


FAULTY = """
import asyncio

from rollbook.envs import Environment
from rollbook.rollouts.types import Feedback

class Panic(BaseException):
    pass

class e(Environment):
    def start(self, task):
        self.id = task.id
        return super().start(task)

    async def step(self, message):
        match self.id:
            case "t1":
                raise Panic("half a \\ud83c character")
            case "t2":
                raise asyncio.CancelledError
            case "t3":
                asyncio.current_task().cancel()
                await asyncio.sleep(0)
            case "t4":
                raise KeyboardInterrupt
            case "t5":
                return Feedback(reward=1.0, stop_reason=5)
        return Feedback(reward=1.0)
"""


def faulty(directory: Path) -> None:
    small_input(directory, 7)
    (directory / "env.py").write_text(FAULTY)
    agent = {"env": {"name": f"{directory / 'env.py'}:e"}, "policy": {"kind": "scripted", "script": ["2"]}}
    config(directory, agents={"a": agent})


@pytest.mark.parametrize("workers", [1, 2])
def test_whatever_an_environment_raises_is_the_failure_of_its_row(workers: int, tmp_path: Path) -> None:
    faulty(tmp_path)
    progress = run(tmp_path, f"workers={workers}")
    failures = [orjson.loads(line) for line in (tmp_path / "out_failures.ndjson").read_bytes().splitlines()]
    assert {failure["_rb_key"] for failure in failures} == {"t1#0", "t2#0", "t3#0", "t4#0"}
    assert {failure["kind"] for failure in failures} == {"environment"}
    assert (progress.done, progress.failed, progress.missing) == (3, 4, 4)
    assert_exactly_once(tmp_path / "out.jsonl", {"t0#0", "t5#0", "t6#0"})


def test_an_actor_has_an_answer_for_every_item(tmp_path: Path) -> None:
    faulty(tmp_path)
    items = [Item(n, 0, f"t{n}", orjson.dumps(row(f"t{n}"))) for n in range(7)]

    async def play() -> list[Answer]:
        actor = RolloutActor()
        await actor.begin(encode_settings(settings(tmp_path)), str(Path.cwd()), {})
        answers = [decode_answer(await actor.run(encode_item(item))) for item in items]
        await actor.close()
        return answers

    kinds = {answer.row: answer.failure and answer.failure.kind for answer in asyncio.run(play())}
    assert kinds == {n: FailureKind.ENVIRONMENT if n in range(1, 5) else None for n in range(7)}


def test_settings_that_cannot_work_are_refused_before_any_worker(tmp_path: Path) -> None:
    small_input(tmp_path, 3)
    endpoint = {"kind": "openai", "base_url": "http://127.0.0.1:9/v1", "model": "m"}
    config(tmp_path, {**endpoint, "api_key_env": "NO_SUCH_KEY"})
    assert "NO_SUCH_KEY" not in os.environ
    with pytest.raises(UsageError, match="type: export NO_SUCH_KEY="):
        run(tmp_path, "workers=2", "resume=never")
    config(tmp_path)
    assert run(tmp_path, "resume=never").done == 3  # the attempt left nothing that stands in the way


@pytest.mark.parametrize("parallel", [1, 50])
def test_workers_that_all_die_end_it(parallel: int, tmp_path: Path) -> None:
    """With that error, before every rollout is given up: there is nothing wrong with them."""
    small_input(tmp_path, 50)
    policy = script(tmp_path, "return '2'")
    with (tmp_path / "script.py").open("a") as file:
        file.write("\nimport sys\nif 'worker' in sys.argv[0]:\n    os._exit(7)\n")
    config(tmp_path, policy)
    with pytest.raises(RollbookError, match=r"5 worker processes in a row died .*with exit code 7"):
        run(tmp_path, "workers=2", f"num_samples_in_parallel={parallel}")
    progress = read_progress(tmp_path / "out_progress.json")
    assert progress.status == "failed"
    assert progress.failed == 0


def test_no_more_workers_than_there_is_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_input(tmp_path, 3)
    config(tmp_path)
    started: list[int] = []
    start = workers.worker_processes

    def counted(chosen: CollectSettings) -> workers.WorkerGroup:
        started.append(chosen.workers)
        return start(chosen)

    monkeypatch.setattr(workers, "worker_processes", counted)
    run(tmp_path, "workers=8", "limit=2")
    run(tmp_path, "workers=8")
    assert started == [2, 1]
    assert_exactly_once(tmp_path / "out.jsonl", expected_keys(3, 1))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows the children of a process")
def test_workers_that_somebody_kills_while_they_start_are_no_reason_to_give_up(tmp_path: Path) -> None:
    """More of them in a row than may end by themselves."""
    small_input(tmp_path, 6)
    policy = script(tmp_path, "return '2'")
    (tmp_path / "starts").mkdir()
    with (tmp_path / "script.py").open("a") as file:
        file.write(
            "\nimport signal, sys\n"
            "starts = pathlib.Path(__file__).with_name('starts')\n"
            "if 'worker' in sys.argv[0]:\n"
            "    (starts / str(os.getpid())).touch()\n"
            f"    if len(list(starts.iterdir())) <= {workers._MOST_DEATHS + 2}:\n"
            "        os.kill(os.getpid(), signal.SIGKILL)\n"
        )
    config(tmp_path, policy)
    progress = run(tmp_path, "workers=2")
    assert (progress.done, progress.failures) == (6, {})


class NeverBegins:
    """A worker that dies while it starts."""

    def __init__(self, death: workers.WorkerDied) -> None:
        self.was_ended = False
        self._death = death

    async def begin(self) -> None:
        raise self._death

    async def run(self, item: Item) -> Answer:
        raise AssertionError("it was given an item")

    async def ended(self) -> None:
        raise AssertionError("it was waited for")

    async def close(self) -> None:
        self.was_ended = True

    kill = close


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(("was_killed", "starts"), [(False, 5), (True, 20)])
def test_workers_that_never_begin_end_it_after_so_many_starts(
    was_killed: bool, starts: int, alone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_LONGEST_PAUSE_S", 0.0)
    monkeypatch.setattr(workers, "_FIRST_PAUSE_S", 0.0)
    small_input(tmp_path, 1)
    config(tmp_path)
    started: list[NeverBegins] = []

    async def start() -> NeverBegins:
        started.append(NeverBegins(workers.WorkerDied("of something", was_killed=was_killed)))
        return started[-1]

    async def play() -> None:
        group = workers.WorkerGroup(settings(tmp_path), start, "workers", "their messages are above")
        try:
            await group.run(Item(0, 0, "t0", b"{}", alone=alone))
        finally:
            await group.close()

    why = (
        r"20 workers in a row were killed .*if memory ran out .*set fewer workers="
        if was_killed
        else "5 workers"
    )
    with pytest.raises(RollbookError, match=why):
        asyncio.run(play())
    assert starts <= len(started) <= starts + 1  # another may be on its way
    assert all(worker.was_ended for worker in started)
