"""Collections killed at random points and resumed: every key exactly once, no line ever lost or torn.

SIGKILL and SIGTERM of the collector, with one process and with four workers, and SIGKILL of single workers.
What was acknowledged (`done` of the progress file) and every whole line that once was in the output must
still be there after the next kill.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from collecting import assert_exactly_once, config, expected_keys, script, small_input, words
from faults.harness import HERE, PATIENCE, seeded

ROWS, REPEATS = 60, 2
LINE = 760  # about what a line has
CAMPAIGNS = 2  # at a time


class Killer:
    """The process that starts collections and kills them."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "collecting_process.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(orjson.dumps(request).decode() + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = orjson.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE)
        self._process.__exit__(None, None, None)


@contextmanager
def killer() -> Iterator[Killer]:
    found = Killer()
    try:
        yield found
    finally:
        found.close()


class Collection:
    """One collection, killed again and again, and what must be true of it each time."""

    def __init__(self, directory: Path, killer: Killer, workers: int) -> None:
        directory.mkdir()
        self.output = directory / "out.jsonl"
        self._log = directory / "log"
        self._progress = directory / "out_progress.json"
        self._killer = killer
        small_input(directory, ROWS)
        config(directory, script(directory, "await asyncio.sleep(random.uniform(0, 0.02))\nreturn '2'"))
        self._words = words(
            directory, f"num_repeats={REPEATS}", "num_samples_in_parallel=8", f"workers={workers}"
        )
        self._whole = b""  # every complete line that was ever seen

    def run(self, kill: str | None, after_s: float = 0.0, after_bytes: int = 0) -> dict[str, Any]:
        answer = self._killer.ask(
            words=self._words,
            log=str(self._log),
            output=str(self.output),
            kill=kill,
            after_s=after_s,
            after_bytes=after_bytes,
        )
        allowed = {"KILL": {-9, 0, 3}, "TERM": {-15, 0, 3}, "TERM TERM": {-15, 0, 3, 130}}
        said = self._log.read_text() if self._log.exists() else ""  # a kill may come before its first word
        assert answer["code"] in allowed.get(kill or "", {0, 3}), f"{answer}:\n{said}"
        assert "Traceback" not in said
        self._nothing_is_lost()
        wait_until_gone(answer["workers"])
        return answer

    def _nothing_is_lost(self) -> None:
        content = self.output.read_bytes() if self.output.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        assert whole.startswith(self._whole), "a line that was in the file is gone or changed"
        self._whole = whole
        for line in whole.splitlines():
            orjson.loads(line)
        if self._progress.exists():
            done = orjson.loads(self._progress.read_bytes())["done"]
            assert done <= whole.count(b"\n"), "more was acknowledged than is there"

    def complete(self) -> None:
        for _ in range(3):  # rollouts whose workers were killed too often are left to the next session
            if self.run(None)["code"] == 0:
                break
        assert_exactly_once(self.output, expected_keys(ROWS, REPEATS))
        assert orjson.loads(self._progress.read_bytes())["done"] == ROWS * REPEATS


def wait_until_gone(pids: list[int]) -> None:
    """Workers must not outlive their collector."""
    deadline = time.monotonic() + PATIENCE
    while left := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"workers {left} outlive their collector"
        time.sleep(0.002)


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z" and "rollbook" in command_of(pid)


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def kill_collectors(directory: Path, chance: random.Random, kills: int, workers: int) -> None:
    """So many kills of the collector, over as many collections as it takes."""
    with killer() as process:
        number = 0
        while kills > 0:
            collection = Collection(directory / str(number), process, workers)
            number += 1
            for _ in range(min(kills, chance.randint(2, 6))):
                kind = chance.choice(["KILL", "KILL", "KILL", "TERM", "TERM", "TERM TERM"])
                # Some at the very start, most when a few more lines are there.
                few = chance.random() < 0.7
                after_bytes = LINE * chance.randint(1, 40) if few else 0
                after_s = chance.uniform(0, 0.03) if few else chance.uniform(0, 0.3)
                kills -= collection.run(kind, after_s, after_bytes)["kills"]
            collection.complete()


def kill_workers(directory: Path, chance: random.Random, kills: int) -> None:
    most = 10 * kills  # collections: one that is over before it was hit is none of the kills
    with killer() as process:
        number = 0
        while kills > 0:
            assert number < most, f"{kills} kills are left: no worker was found to be killed"
            collection = Collection(directory / str(number), process, 4)
            number += 1
            kills -= collection.run("worker", 0.0, LINE * chance.randint(5, 30))["kills"]
            collection.complete()


def side_by_side(directory: Path, what: str, kills: int, **options: int) -> None:
    """Campaigns of different seeds at the same time."""
    with seeded(what) as chance, ThreadPoolExecutor(CAMPAIGNS) as pool:
        running = []
        for number in range(CAMPAIGNS):
            place = directory / f"campaign{number}"
            place.mkdir()
            task = kill_collectors if options else kill_workers
            own = random.Random(chance.random())
            running.append(pool.submit(task, place, own, kills // CAMPAIGNS, **options))
        for future in running:
            future.result()


def test_a_few_kills_of_one_process(tmp_path: Path) -> None:
    side_by_side(tmp_path, "one process", 8, workers=1)


def test_a_few_kills_of_a_collector_with_workers(tmp_path: Path) -> None:
    with seeded("with workers") as chance:
        kill_collectors(tmp_path, chance, 2, workers=4)


def test_a_few_killed_workers(tmp_path: Path) -> None:
    with seeded("killed workers") as chance:
        kill_workers(tmp_path, chance, 3)


@pytest.mark.faults
def test_many_kills_of_one_process(tmp_path: Path) -> None:
    side_by_side(tmp_path, "one process", 640, workers=1)


@pytest.mark.faults
def test_many_kills_of_a_collector_with_workers(tmp_path: Path) -> None:
    side_by_side(tmp_path, "with workers", 160, workers=4)


@pytest.mark.faults
def test_many_killed_workers(tmp_path: Path) -> None:
    side_by_side(tmp_path, "killed workers", 200)


def test_the_pids_of_this_machine_can_be_seen() -> None:
    """What the check for left-over workers rests on."""
    assert command_of(os.getpid())
