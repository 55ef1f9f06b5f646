"""Collections on a Ray cluster, killed at random points and resumed: every key exactly once, nothing lost.

SIGKILL and SIGTERM of the collector, and SIGKILL of actors, whose leases others take over. The cluster is
started once and joined by every collection; a cluster of a collection's own must die with its collector.
`make test` has a few such kills in collect/test_ray_engine.py, on the cluster that it starts anyway.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from collecting import config, script
from faults.harness import PATIENCE, seeded
from faults.test_killed_collections import LINE, Collection, Killer, command_of, killer

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs rollbook[ray]")
RAY = [sys.executable, "-m", "ray.scripts.scripts"]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A cluster that lives as long as these tests, with a token of its own."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        words = ["--head", f"--port={port}", "--num-cpus=2", "--include-dashboard=false", "--block"]
        head = subprocess.Popen(
            [*RAY, "start", *words, "--disable-usage-stats"], stdout=subprocess.PIPE, text=True
        )
        assert head.stdout is not None
        said = ""
        while "Ray runtime started" not in said:
            line = head.stdout.readline()
            assert line, f"no cluster:\n{said}"
            said += line
        threading.Thread(target=head.stdout.read, daemon=True).start()  # or a full pipe would stop it
        try:
            yield f"127.0.0.1:{port}"
        finally:
            head.terminate()  # and with it, by --block, what it started
            head.wait(PATIENCE)


class RayCollection(Collection):
    """Rollouts write down the pid of the actor they run in, for those who want to kill it."""

    def __init__(self, directory: Path, killer: Killer, address: str | None) -> None:
        super().__init__(directory, killer, workers=2)
        self._pids = directory / "pids"
        self._pids.mkdir()
        body = (
            f"(pathlib.Path({str(self._pids)!r}) / str(os.getpid())).touch()\n"
            "await asyncio.sleep(random.uniform(0, 0.2))\n"
            "return '2'"
        )
        config(directory, script(directory, body))
        self._words += ["engine=ray", *([f"ray_address={address}"] if address else [])]

    def actors(self) -> list[int]:
        pids = [int(file.name) for file in self._pids.iterdir()]
        return [pid for pid in pids if command_of(pid).startswith("ray::RolloutActor")]

    def run_and_kill_actors(self, chance: random.Random, kills: int) -> int:
        """One session, in which so many actors are killed, if it lasts that long."""
        ended = threading.Event()
        killed = 0

        def kill() -> None:
            nonlocal killed
            while killed < kills and not ended.wait(chance.uniform(0.1, 0.6)):
                if actors := self.actors():
                    os.kill(chance.choice(actors), signal.SIGKILL)
                    killed += 1

        thread = threading.Thread(target=kill)
        thread.start()
        try:
            self.run(None)
        finally:
            ended.set()
            thread.join()
        return killed

    def wait_until_no_actor_is_left(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while left := self.actors():
            assert time.monotonic() < deadline, f"actors {left} outlive their collector"
            time.sleep(0.05)


def campaign(directory: Path, chance: random.Random, address: str, kills: int) -> dict[str, int]:
    """So many kills, over as many collections as it takes; returns how many of each kind."""
    counts = {"KILL": 0, "TERM": 0, "TERM TERM": 0, "actor": 0}
    number = 0
    with killer() as process:
        while sum(counts.values()) < kills:
            collection = RayCollection(directory / str(number), process, address)
            number += 1
            for _ in range(chance.randint(1, 2)):
                kind = chance.choice(["KILL", "KILL", "TERM", "TERM TERM"])
                lines = chance.randint(1, 40)
                counts[kind] += collection.run(kind, chance.uniform(0, 0.1), LINE * lines)["kills"]
                collection.wait_until_no_actor_is_left()
            counts["actor"] += collection.run_and_kill_actors(chance, chance.randint(1, 4))
            collection.complete()
            collection.wait_until_no_actor_is_left()
    assert counts["actor"] < sum(counts.values()), "no collector was killed"
    return counts


@pytest.mark.faults
def test_many_kills_on_a_ray_cluster(tmp_path: Path, address: str) -> None:
    with seeded("many on Ray") as chance:
        print(campaign(tmp_path, chance, address, 60))


@pytest.mark.faults
def test_a_cluster_of_its_own_dies_with_its_collector(tmp_path: Path) -> None:
    with seeded("a cluster of its own") as chance, killer() as process:
        collection = RayCollection(tmp_path / "0", process, None)
        for kind in ("KILL", "TERM TERM"):
            collection.run(kind, 0.0, LINE * chance.randint(1, 20))
            collection.wait_until_no_actor_is_left()
        collection.complete()
        collection.wait_until_no_actor_is_left()
