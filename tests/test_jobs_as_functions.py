"""Jobs called from Python: `rollbook.collect`, `rollbook.sft` and `rollbook.rl`, wherever a user may be."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rollbook
from collecting import assert_exactly_once, config, expected_keys, keys, script, small_input
from helpers.rl_runs import config_of, write_setup
from rollbook.errors import UsageError
from tiny_model import write_config

Job = Callable[[], Any]


def quiet(_: object) -> None:
    return None


def called_here(job: Job) -> Any:
    return job()


def called_in_a_thread(job: Job) -> Any:
    """A web server, a test of somebody's."""
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(job()))
    thread.start()
    thread.join()
    return answers[0]


def called_in_a_running_loop(job: Job) -> Any:
    """A cell of a notebook."""

    async def cell() -> Any:
        before = asyncio.get_running_loop()
        answer = job()
        assert asyncio.get_running_loop() is before
        await asyncio.sleep(0)
        return answer

    return asyncio.run(cell())


PLACES = [called_here, called_in_a_thread, called_in_a_running_loop]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("place", PLACES)
def test_a_collection(place: Callable[[Job], Any], workers: int, tmp_path: Path) -> None:
    small_input(tmp_path, 5)
    words = [
        "agent_name=a",
        f"input_jsonl_fpath={tmp_path / 'in.jsonl'}",
        f"output_jsonl_fpath={tmp_path / 'out.jsonl'}",
        f"workers={workers}",
    ]
    progress = place(lambda: rollbook.collect(config(tmp_path), *words, log=quiet))
    assert (progress.status, progress.done, progress.reward_mean) == ("completed", 5, 1.0)
    assert_exactly_once(tmp_path / "out.jsonl", expected_keys(5))


def test_an_interrupted_cell_leaves_a_collection_that_goes_on(tmp_path: Path) -> None:
    """The interrupt of a notebook reaches the thread of the cell, and not the one that collects."""
    small_input(tmp_path, 6)
    asked = tmp_path / "asked"
    body = f"""\
with open({str(asked)!r}, "a") as file:
    file.write("x")
if pathlib.Path({str(asked)!r}).stat().st_size == 3:
    os.kill({os.getpid()}, {int(signal.SIGINT)})
    await asyncio.sleep(60)
return "2"
"""
    words = [
        "agent_name=a",
        f"input_jsonl_fpath={tmp_path / 'in.jsonl'}",
        f"output_jsonl_fpath={tmp_path / 'out.jsonl'}",
        "num_samples_in_parallel=1",
    ]
    agent = config(tmp_path, script(tmp_path, body))

    async def cell() -> Any:
        return rollbook.collect(agent, *words, log=quiet)

    loop = asyncio.new_event_loop()  # with the handler of a notebook, which is Python's own
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(cell())
    finally:
        signal.signal(signal.SIGINT, before)
        loop.close()
    assert len(keys(tmp_path / "out.jsonl")) == 2
    assert rollbook.collect(agent, *words, log=quiet).status == "completed"
    assert_exactly_once(tmp_path / "out.jsonl", expected_keys(6))


@pytest.mark.parametrize("place", PLACES)
def test_a_fine_tuning(place: Callable[[Job], Any], tmp_path: Path) -> None:
    path = write_config(tmp_path, training__max_steps=3)
    results = place(lambda: rollbook.sft(path, artifacts=tmp_path / "artifacts", log=quiet))
    assert results["train_loss"] > 0
    assert (tmp_path / "artifacts/model/demo/checkpoint-3/model.safetensors").exists()


def test_a_fine_tuning_goes_on_and_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    path, artifacts = write_config(tmp_path, training__max_steps=2), tmp_path / "artifacts"
    rollbook.sft(path, artifacts=artifacts, log=quiet)
    said: list[str] = []
    rollbook.sft(path, "training.max_steps=4", artifacts=artifacts, resume=True, log=said.append)
    assert any("resuming from" in line and "checkpoint-2" in line for line in said)
    with pytest.raises(UsageError, match="choose one"):
        rollbook.sft(path, resume=True, overwrite=True)
    with pytest.raises(UsageError, match="type rollbook sft"):
        rollbook.sft(path, "engine=llamafactory")


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_setup(tmp_path_factory.mktemp("rl"))


@pytest.mark.parametrize("place", PLACES)
def test_reinforcement_learning(place: Callable[[Job], Any], setup: Path, tmp_path: Path) -> None:
    settings = config_of(setup, tmp_path / "run", iterations=2)
    result = place(lambda: rollbook.rl(settings, log=quiet))
    assert result.iterations == 2 and result.evals.keys() == {"test"}
    assert result.checkpoint == tmp_path / "run/checkpoints/000002"
