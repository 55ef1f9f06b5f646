"""The recorder, its events called as the Trainer calls them.

For what a real run cannot show without a clock, a cluster or a full disk: time left after a resume, other
ranks, how a process ends.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rollbook.recorder
import rollbook.records.trainer_log
from recorded import alerts, log_lines, only_record, python
from rollbook.recorder import Recorder
from rollbook.runs.jobs.ledger import Ledger


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    for name in ("ROLLBOOK_RUN_DIR", "ROLLBOOK_ARTIFACTS"):
        monkeypatch.delenv(name, raising=False)
    yield
    rollbook.recorder._open.clear()  # a test that leaves a run open leaves none for the end of pytest


class Driver:
    """What the Trainer does to a callback, without a model."""

    def __init__(self, recorder: Recorder, *, step: int = 0, tokens: int = 0, zero: bool = True) -> None:
        self.recorder = recorder
        self.args = SimpleNamespace(output_dir="out", logging_nan_inf_filter=True, fp16=False)
        self.state = SimpleNamespace(
            global_step=step, max_steps=10, num_input_tokens_seen=tokens, is_world_process_zero=zero
        )
        self.call("on_init_end")
        self.call("on_train_begin")

    def call(self, event: str, **values: Any) -> None:
        getattr(self.recorder, event)(self.args, self.state, SimpleNamespace(), model=None, **values)

    def step(self, tokens: int = 0, **logs: Any) -> None:
        self.state.global_step += 1
        self.state.num_input_tokens_seen += tokens
        self.call("on_step_end")
        self.call("on_log", logs=logs)


@pytest.mark.parametrize("counted_by_trl", [False, True])
def test_time_left_and_throughput_after_a_resume(
    monkeypatch: pytest.MonkeyPatch, counted_by_trl: bool
) -> None:
    now = 1000.0
    monkeypatch.setattr(rollbook.records.trainer_log.time, "monotonic", lambda: now)

    def steps(driver: Driver, count: int, seconds: float) -> None:
        nonlocal now
        for number in range(1, count + 1):
            now += seconds
            if counted_by_trl:  # its num_tokens begins at 0 in every process
                driver.step(loss=1.0, num_tokens=100.0 * number)
            else:
                driver.step(tokens=100, loss=1.0)
            if driver.state.global_step == 6:
                Path("out/checkpoint-6").mkdir()
                driver.call("on_save")

    steps(Driver(Recorder()), 8, seconds=1.0)
    now += 5000.0
    steps(Driver(Recorder(), step=6, tokens=0 if counted_by_trl else 600), 2, seconds=4.0)
    lines = log_lines()
    assert [line["current_steps"] for line in lines] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (lines[5]["elapsed_time"], lines[5]["remaining_time"]) == ("0:00:06", "0:00:04")
    assert (lines[5]["throughput"], lines[5]["total_tokens"]) == (100.0, 600)
    assert (lines[7]["elapsed_time"], lines[7]["remaining_time"]) == ("0:00:14", "0:00:08")
    assert (lines[7]["throughput"], lines[7]["total_tokens"]) == (round(800 / 14, 2), 800)


def test_a_resume_into_another_directory_counts_what_it_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(rollbook.records.trainer_log.time, "monotonic", lambda: now)
    driver = Driver(Recorder(), step=6, tokens=600)
    now = 2.0
    driver.step(tokens=100, loss=1.0)
    [line] = log_lines()
    assert (line["throughput"], line["total_tokens"]) == (50.0, 700)


def test_a_filtered_loss_is_known_by_its_gradient() -> None:
    driver = Driver(Recorder())
    driver.step(loss=0.0, grad_norm=math.nan)
    driver.step(loss=0.0, grad_norm=0.5)  # GRPO logs 0.0 by right
    driver.step(loss=2.0, grad_norm=math.inf)
    lines = log_lines()
    assert [line["loss"] for line in lines] == [None, 0.0, 2.0]
    assert [line.get("nonfinite") for line in lines] == [["loss", "grad_norm"], None, ["grad_norm"]]
    assert [(alert.level, alert.step) for alert in alerts()] == [("error", 1), ("warning", 3)]


def test_values_of_all_kinds() -> None:
    import numpy
    import torch

    driver = Driver(Recorder())
    driver.step(
        loss=torch.tensor(0.5),
        reward=numpy.float32(0.25),
        kl=None,
        both=torch.ones(2),
        **{"rewards/f/mean": 1},
    )
    [line] = log_lines()
    assert (line["loss"], line["reward"], line["kl"], line["rewards/f/mean"]) == (0.5, 0.25, None, 1)
    assert line["both"] == [1.0, 1.0]


def test_only_the_first_process_writes() -> None:
    driver = Driver(Recorder(), zero=False)
    driver.step(loss=1.0)
    driver.call("on_train_end")
    assert list(Path().iterdir()) == []
    assert driver.args.logging_nan_inf_filter is False  # every rank adds to the loss that is logged


def test_the_log_of_an_earlier_run_is_put_aside() -> None:
    Driver(Recorder()).step(loss=1.0)
    driver = Driver(Recorder())
    driver.step(loss=2.0)
    driver.call("on_train_end")
    [line] = log_lines()
    assert line["loss"] == 2.0
    [old] = Path("out/superseded").rglob("trainer_log.jsonl*")
    assert json.loads(old.read_text())["loss"] == 1.0
    record = Ledger("artifacts").records()[-1]
    assert (record.status, record.reason) == ("completed", "stopped early, at step 1 of 10")


ALONE = """
import signal, sys
from types import SimpleNamespace
from rollbook.recorder import Recorder
args = SimpleNamespace(output_dir="out", logging_nan_inf_filter=True, fp16=False)
state = SimpleNamespace(global_step=0, max_steps=10, num_input_tokens_seen=0, is_world_process_zero=True)
recorder = Recorder()
recorder.on_train_begin(args, state, None)
recorder.on_log(args, state, None, logs={"loss": 1.0})
"""


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("sys.exit(0)", "failed"),
        ("signal.raise_signal(signal.SIGINT)", "interrupted"),
        ("recorder.on_train_end(args, state, None)", "completed"),
    ],
)
def test_how_a_process_ends(ending: str, status: str) -> None:
    Path("script.py").write_text(ALONE + ending)
    python("script.py")
    assert only_record().status == status
    assert json.loads(Path("out/run.json").read_text())["attempts"][-1]["outcome"] == status
