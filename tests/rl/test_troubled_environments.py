"""Environments that fail, hang or hold up everything: what becomes of the run, and what it says."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers.rl_runs import config_of, settings_of, start, write_setup
from helpers.trainer import TrainingProcess
from rollbook.records.iterations import read_iterations
from rollbook.rl import train as story
from rollbook.rl.settings import load_settings
from rollbook.rl.train import FailedRolloutsError, train
from rollbook.runs.stop_signals import Stopped

ENVIRONMENTS = """\
import asyncio
import time
from pathlib import Path
from rollbook.envs import single_turn

FLAG = Path(__file__).parent / "flag"


def has_vowel(answer):
    return float(any(letter in "aeiou" for letter in answer))


@single_turn
def graded(task, answer):
    if FLAG.exists():
        raise ValueError("no \\x1b[31mgrade")
    return has_vowel(answer)


@single_turn
def picky(task, answer):
    if len(answer) % 2:
        raise ValueError("an odd length")
    return has_vowel(answer)


@single_turn
def blocking(task, answer):
    while FLAG.exists():
        time.sleep(0.01)
    return has_vowel(answer)


@single_turn
async def waiting(task, answer):
    while FLAG.exists():
        await asyncio.sleep(0.01)
    return has_vowel(answer)
"""


@pytest.fixture
def setup(tmp_path: Path) -> Path:
    (tmp_path / "envs.py").write_text(ENVIRONMENTS)
    return write_setup(tmp_path)


def config(setup: Path, name: str, **changes: Any) -> dict[str, Any]:
    tasks = str(setup / "tasks.jsonl")
    environment = {"name": f"{setup / 'envs.py'}:{name}", "as": "vowels", "tasks": tasks}
    return config_of(setup, setup / "run", **{"environments": [environment], "evals": [], **changes})


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_whose_rollouts_all_fail_ends_with_the_reason_and_goes_on_once_it_is_fixed(setup: Path) -> None:
    flag = setup / "flag"
    settings = load_settings(config(setup, "graded"))
    run = setup / "run"

    def break_it(text: str) -> None:
        if text.startswith("2/6"):
            flag.touch()

    with pytest.raises(FailedRolloutsError) as failed:
        train(settings, log=break_it)
    assert "iteration 3: 16 of 16 rollouts failed: environment: graded.step: ValueError" in str(failed.value)
    assert "--resume" in str(failed.value)
    *_, last = read_iterations(run / "iterations.jsonl")
    assert last.iteration == 3 and last.error is not None and last.weights_digest is None
    assert not (run / "checkpoints/000003").exists()
    flag.unlink()
    train(settings, resume=True, log=lambda _: None)
    assert [record.iteration for record in read_iterations(run / "iterations.jsonl")] == list(range(6))
    assert [row["step"] for row in metrics(run)] == list(range(6))


def test_an_iteration_in_which_some_rollouts_failed_says_why(setup: Path) -> None:
    lines: list[str] = []
    train(load_settings(config(setup, "picky", iterations=1)), log=lines.append)
    (said,) = [line for line in lines if "rollouts failed:" in line]
    assert "ValueError: an odd length" in said and "envs.py:" in said
    failed = metrics(setup / "run")[0]["env/all/rollouts/failed"]
    assert said.startswith(f"  {failed} of 16 rollouts failed: ") and 0 < failed < 16
    assert "rollouts fail" in (setup / "run/alerts.jsonl").read_text()


def test_what_fails_is_printed_without_its_control_characters(setup: Path) -> None:
    (setup / "flag").touch()
    settings = load_settings(config(setup, "graded"))
    with start(settings) as trainer:
        assert trainer.wait() == 1
        assert "no <U+001B>[31mgrade" in trainer.output and "\x1b" not in trainer.output


def test_an_evaluation_in_which_every_rollout_fails_is_an_alert(setup: Path) -> None:
    evals = [{"name": "test", "environment": "broken", "tasks": str(setup / "held-out.jsonl")}]
    given = config(setup, "blocking", evals=evals, iterations=1)
    broken = {**given["environments"][0], "name": f"{setup / 'envs.py'}:graded", "as": "broken"}
    given["environments"] = [{**given["environments"][0], "weight": 1e9}, {**broken, "weight": 1e-9}]
    (setup / "envs.py").write_text(ENVIRONMENTS.replace("if FLAG.exists():", "if True:"))
    lines: list[str] = []
    train(load_settings(given), log=lines.append)
    assert any(line.startswith("  6 of 6 rollouts failed: environment: graded.step") for line in lines)
    assert "every rollout of eval test failed" in (setup / "run/alerts.jsonl").read_text()


@pytest.mark.parametrize("limit", ["episode_timeout_s", "call_timeout_s"])
def test_a_function_that_does_not_return_is_named_and_ends_the_run(setup: Path, limit: str) -> None:
    (setup / "flag").touch()
    settings = load_settings(config(setup, "blocking", stall_after_s=0.5, **{limit: 0.1}))
    with start(settings) as trainer:
        assert trainer.wait() == 1
        last = trainer.output.splitlines()[-1]
    line_number = ENVIRONMENTS.splitlines().index("    while FLAG.exists():") + 1
    assert last.startswith("rollbook: blocking (") and f"{limit} is 0.1" in last
    assert any(
        f"envs.py:{number}) has held up all rollouts" in last for number in (line_number, line_number + 1)
    )
    told = [json.loads(line) for line in (setup / "run/stalls.jsonl").read_text().splitlines()]
    assert {len(stall["waiting"]) for stall in told} == {16}
    assert any(stall["blocked"] and "blocking (" in stall["blocked"]["place"] for stall in told)
    assert (setup / "run/alerts.jsonl").read_text() == ""  # equal runs have equal alerts


def test_a_stop_does_not_wait_for_rollouts_for_ever_and_loses_no_iteration(
    setup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(story, "_STOP_WAITS_S", 0.2)
    flag, run = setup / "flag", setup / "run"
    evals = [{"name": "test", "environment": "vowels", "tasks": str(setup / "held-out.jsonl"), "every": 3}]
    given = config(setup, "waiting", evals=evals, save_every=100)

    def stop_it(text: str) -> None:
        if text.startswith("eval test before iteration 3"):
            flag.touch()
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped, match="stopped in iteration 3"):
        train(load_settings(given), log=stop_it)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["000003"]
    flag.unlink()
    train(load_settings(given), resume=True, log=lambda _: None)
    train(load_settings(given | {"log_path": str(setup / "other")}), log=lambda _: None)
    found, expected = (
        [(record.split, record.iteration, record.weights_digest) for record in read_iterations(path)]
        for path in (run / "iterations.jsonl", setup / "other/iterations.jsonl")
    )
    assert found == expected and len(found) == 6 + 3
    keys = "env/all/reward/total", "test/env/all/reward/total", "entropy"
    rows = [[[row.get(key) for key in keys] for row in metrics(path)] for path in (run, setup / "other")]
    assert rows[0] == rows[1]


def test_several_processes_finish_the_iteration_when_they_are_stopped(setup: Path) -> None:
    settings = settings_of(setup, setup / "run", processes=2, iterations=200, save_every=1000)
    together = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    together["ROLLBOOK_SETTINGS"] = msgspec.json.encode(settings).decode()
    words = ["rollbook.rl.main", "--artifacts", str(setup / "artifacts")]
    ranks = [TrainingProcess(*words, RANK=str(rank), LOCAL_RANK=str(rank), **together) for rank in range(2)]
    try:
        ranks[0].wait_for(r"  3/200")
        for rank in ranks:
            rank.send_signal(signal.SIGTERM)
        codes = [rank.wait() for rank in ranks]
        output = "".join(rank.output for rank in ranks)
        assert codes == [130, 0], output
        assert "Traceback" not in output
        (checkpoint,) = (setup / "run/checkpoints").iterdir()
        assert f"stopped after iteration {int(checkpoint.name) - 1} (SIGTERM)" in output
    finally:
        for rank in ranks:
            TrainingProcess.__exit__(rank)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    return port
