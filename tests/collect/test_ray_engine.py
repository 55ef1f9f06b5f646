"""Rollouts on a Ray cluster: the same results as here; an actor's death costs only what it had in flight."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from collecting import (
    assert_exactly_once,
    config,
    expected_keys,
    results,
    run,
    script,
    settings,
    small_input,
)
from faults.harness import seeded
from faults.test_killed_ray_collections import campaign
from rollbook.collect import ray_engine
from rollbook.errors import RollbookError, UsageError

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs rollbook[ray]")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One cluster of this machine for all tests: it takes seconds to start. Its address."""
    import ray

    directory = tmp_path_factory.mktemp("cluster")
    config(directory)
    ray_engine._connect(ray, settings(directory, "engine=ray", "workers=2"))
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@pytest.mark.usefixtures("cluster")
def test_more_workers_than_cpus_collect_everything_once(tmp_path: Path) -> None:
    small_input(tmp_path, 100)
    config(tmp_path, script(tmp_path, "await asyncio.sleep(random.uniform(0, 0.02))\nreturn '2'"))
    progress = run(tmp_path, "engine=ray", "workers=3", "num_repeats=2", "num_samples_in_parallel=16")
    assert progress.done == 200 and not progress.failures
    assert_exactly_once(tmp_path / "out.jsonl", expected_keys(100, 2))
    assert {line["reward"] for line in results(tmp_path / "out.jsonl")} == {1.0}


@pytest.mark.usefixtures("cluster")
def test_in_order_it_is_what_one_process_collects(tmp_path: Path) -> None:
    found = []
    for engine in ("ray", "local"):
        small_input(tmp_path, 20)
        config(tmp_path)
        run(tmp_path, f"engine={engine}", "ordered=true")
        lines = results(tmp_path / "out.jsonl")
        for line in lines:
            del line["response"]["created_at"]
        found.append(lines)
        for file in tmp_path.glob("*out*"):
            file.unlink()
    assert found[0] == found[1]
    assert [line["_rb_key"] for line in found[0]] == [f"t{number}#0" for number in range(20)]


@pytest.mark.usefixtures("cluster")
def test_a_reply_whose_grading_crashed_is_kept(tmp_path: Path) -> None:
    small_input(tmp_path, 1)
    config(tmp_path)
    grader = (
        "from rollbook.envs import single_turn\n\n@single_turn\ndef own(task, answer):\n    return 1 / 0\n"
    )
    (tmp_path / "own.py").write_text(grader)
    run(tmp_path, "engine=ray", f"agents.a.env.name={tmp_path}/own.py:own")
    (record,) = results(tmp_path / "out_failures.ndjson")
    assert record["response"]["output"][0]["content"][0]["text"] == "2"


@pytest.mark.usefixtures("cluster")
def test_what_a_killed_actor_held_is_done_by_another(tmp_path: Path) -> None:
    once = tmp_path / "once"
    body = (
        f"once = pathlib.Path({str(once)!r})\n"
        "if not once.exists():\n    once.touch()\n    os._exit(9)\n"
        "return '2'"
    )
    small_input(tmp_path, 30)
    config(tmp_path, script(tmp_path, body))
    progress = run(tmp_path, "engine=ray", "workers=2", "num_samples_in_parallel=4")
    assert progress.failures["worker_lost"] >= 1
    assert_exactly_once(tmp_path / "out.jsonl", expected_keys(30))


def test_a_few_kills_of_collectors_and_actors(tmp_path: Path, cluster: str) -> None:
    with seeded("a few on Ray") as chance:
        print(campaign(tmp_path, chance, cluster, 2))


@pytest.mark.usefixtures("cluster")
def test_actors_that_all_die_before_they_can_begin_end_it(tmp_path: Path) -> None:
    small_input(tmp_path, 3)
    policy = script(tmp_path, "return '2'")
    with (tmp_path / "script.py").open("a") as file:
        file.write(f"\nif os.getpid() != {os.getpid()}:\n    os._exit(9)\n")
    config(tmp_path, policy)
    with pytest.raises(RollbookError, match="5 Ray actors in a row died before they could begin"):
        run(tmp_path, "engine=ray")


@pytest.mark.usefixtures("cluster")
def test_an_actor_that_cannot_be_set_up_says_why(tmp_path: Path) -> None:
    small_input(tmp_path, 3)
    policy = script(tmp_path, "return '2'")
    with (tmp_path / "script.py").open("a") as file:
        file.write(
            f"\nif os.getpid() != {os.getpid()}:\n    raise RuntimeError('no tokenizer on this machine')\n"
        )
    config(tmp_path, policy)
    with pytest.raises(RollbookError, match=r"a Ray actor cannot work: .*no tokenizer on this machine"):
        run(tmp_path, "engine=ray")


def test_the_keys_that_settings_name_are_taken_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_JUDGE_KEY", "secret")
    config(tmp_path)
    chosen = settings(tmp_path, "engine=ray", "agents.a.env.judge.api_key_env=SOME_JUDGE_KEY")
    assert ray_engine._keys_of(chosen) == {"SOME_JUDGE_KEY": "secret"}


def test_settings_that_cannot_work_are_refused_before_ray_is_started(tmp_path: Path) -> None:
    small_input(tmp_path, 3)
    endpoint = {"kind": "openai", "base_url": "http://127.0.0.1:9/v1", "model": "m"}
    config(tmp_path, {**endpoint, "api_key_env": "NO_SUCH_KEY"})
    with pytest.raises(UsageError, match="type: export NO_SUCH_KEY="):
        run(tmp_path, "engine=ray", "ray_address=nowhere")


@pytest.mark.parametrize("address", ["nowhere", "ray://127.0.0.1:10001"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(UsageError, match=f"ray_address={address} is .*write HOST:6379"):
        ray_engine._check_address(address)


def test_a_cluster_that_is_not_there_is_said_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(RollbookError, match=f"no Ray cluster answers at ray_address=127.0.0.1:{port}"):
        ray_engine._check_address(f"127.0.0.1:{port}")
