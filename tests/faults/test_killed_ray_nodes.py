"""A Ray cluster of several nodes, of which some are killed in the middle of a collection.

The nodes are raylets on this machine, each with an object store and workers of its own, as machines would be.
What the killed ones held is done by the others, every rollout once, or by one that joins later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from collecting import assert_exactly_once, config, expected_keys, results, row, run, script, write_rows
from faults.harness import PATIENCE, seeded
from rollbook.errors import RollbookError
from rollbook.records.progress import Progress

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs rollbook[ray]"),
]
ROWS = 200
FREE = 40  # rollouts that are done at once; the others are held until they are let go


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head without room for actors."""
    import ray
    from ray.cluster_utils import Cluster

    ray.shutdown()
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


class Nodes:
    """A collection on three nodes with room for one actor each; rollouts write down where they are made."""

    def __init__(self, directory: Path, cluster: Any) -> None:
        self._directory, self._cluster = directory, cluster
        self.nodes = [cluster.add_node(num_cpus=1) for _ in range(3)]
        cluster.wait_for_nodes()
        self._seen, self._go = directory / "nodes", directory / "go"
        self._seen.mkdir()
        write_rows(directory / "in.jsonl", (row(f"t{n}", f"What is 1 + 1? #{n}") for n in range(ROWS)))
        body = (
            "import ray\n"
            f"(pathlib.Path({str(self._seen)!r}) / ray.get_runtime_context().get_node_id()).touch()\n"
            "number = int(request.messages[0]['content'].partition('#')[2])\n"
            f"while number >= {FREE} and not pathlib.Path({str(self._go)!r}).exists():\n"
            "    await asyncio.sleep(0.02)\n"
            "return '2'"
        )
        config(directory, script(directory, body))
        self.said: list[str] = []
        self._result: list[Progress | RollbookError] = []
        self._thread = threading.Thread(target=self._collect)

    def _collect(self) -> None:
        words = (f"ray_address={self._cluster.address}", "workers=3", "num_samples_in_parallel=6")
        try:
            self._result.append(
                run(self._directory, "engine=ray", "retry.worker_lost=10", *words, said=self.said)
            )
        except RollbookError as error:
            self._result.append(error)

    def __enter__(self) -> Nodes:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._go.touch()
        self._thread.join(PATIENCE)

    def used(self) -> list[Any]:
        """The nodes on which a rollout was begun, once only held ones are left."""
        output, deadline = self._directory / "out.jsonl", time.monotonic() + PATIENCE
        while True:
            used = [node for node in self.nodes if (self._seen / node.node_id).exists()]
            if used and output.read_bytes().count(b"\n") == FREE:
                return used
            assert time.monotonic() < deadline and self._thread.is_alive(), (len(used), self._result)
            time.sleep(0.02)

    def kill(self, *nodes: Any) -> None:
        """Kill them, and wait until the collection has lost a rollout by it."""
        for node in nodes:
            self._cluster.remove_node(node, allow_graceful=False)
        deadline = time.monotonic() + PATIENCE
        while not any("first worker_lost failure" in line for line in self.said):
            assert time.monotonic() < deadline and self._thread.is_alive(), (self.said, self._result)
            time.sleep(0.02)

    def finish(self) -> Progress:
        """Let all go: every rollout must be there once."""
        self._go.touch()
        self._thread.join(2 * PATIENCE)
        (found,) = self._result
        assert isinstance(found, Progress), found
        assert (found.done, found.failed, found.missing) == (ROWS, 0, 0)
        assert_exactly_once(self._directory / "out.jsonl", expected_keys(ROWS))
        assert {line["reward"] for line in results(self._directory / "out.jsonl")} == {1.0}
        return found


def test_a_node_that_is_killed_costs_nothing_but_what_it_held(tmp_path: Path, cluster: Any) -> None:
    with seeded("a node") as chance, Nodes(tmp_path, cluster) as collection:
        collection.kill(chance.choice(collection.used()))
        assert 1 <= collection.finish().failures["worker_lost"] <= 6


def test_all_nodes_are_killed_and_another_one_joins(tmp_path: Path, cluster: Any) -> None:
    with Nodes(tmp_path, cluster) as collection:
        collection.used()
        collection.kill(*collection.nodes)
        cluster.add_node(num_cpus=1)
        collection.finish()
