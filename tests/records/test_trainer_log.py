"""The log of a trainer: LLaMA-Factory's keys, no made-up number, and the Trainer's state made from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import rollbook.records.trainer_log
from rollbook.records.jsonl import JsonlWriter
from rollbook.records.trainer_log import (
    LOG,
    TrainerLog,
    best_point,
    last_line,
    read_points,
    trainer_state,
    write_results,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / LOG


def write(path: Path, *points: dict[str, float], **begin: Any) -> None:
    writer = JsonlWriter(path)
    log = TrainerLog(writer.append, total_steps=10, **begin)
    for point in points:
        values = dict(point)
        log.add(int(values.pop("step")), values, int(values.pop("tokens", 0)) or None)
    writer.close()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def test_a_value_that_is_not_finite_is_null_and_named(path: Path) -> None:
    write(path, {"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "learning_rate": 0.1})
    [line] = lines(path)
    assert (line["loss"], line["grad_norm"], line["lr"]) == (None, None, 0.1)
    assert line["nonfinite"] == ["loss", "grad_norm"]
    [point] = read_points(path)
    assert point["loss"] is None and point["learning_rate"] == 0.1


def test_times_count_all_sessions(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 50.0
    monkeypatch.setattr(rollbook.records.trainer_log.time, "monotonic", lambda: now)
    writer = JsonlWriter(path)
    log = TrainerLog(writer.append, total_steps=10, step=3, elapsed_s=100.0)
    now += 10.0
    log.add(5, {"loss": 1.0}, 440)
    writer.close()
    [line] = lines(path)
    assert (line["elapsed_time"], line["elapsed_s"], line["percentage"]) == ("0:01:50", 110.0, 50.0)
    assert line["remaining_time"] == "0:00:25"  # five steps at five seconds, as in this session
    assert (line["throughput"], line["total_tokens"]) == (4.0, 440)


def test_the_state_and_the_results_are_made_from_the_log(path: Path) -> None:
    write(
        path,
        {"step": 1, "loss": 2.0, "learning_rate": 0.1, "epoch": 0.1, "tokens": 10},
        {"step": 1, "eval_loss": 1.5, "eval_runtime": 0.1, "epoch": 0.1, "tokens": 10},
        {"step": 2, "loss": 1.0, "learning_rate": 0.2, "epoch": 0.2, "tokens": 20},
        {"step": 2, "eval_loss": 1.75, "eval_runtime": 0.2, "epoch": 0.2, "tokens": 20},
        {"step": 2, "epoch": 0.2, "tokens": 20},
    )
    assert best_point(read_points(path)) == (1, 1.5)
    summary = {"train_loss": 1.5, "epoch": 0.2}
    given: dict[str, Any] = {"epoch": 0.2, "total_steps": 10, "epochs": 1.0, "tokens": 20, "flos": 5.0}
    state = trainer_state(path, step=2, training={"logging_steps": 1}, summary=summary, **given)
    assert [point["step"] for point in state["log_history"]] == [1, 1, 2, 2, 2]
    assert state["log_history"][0] == {
        "step": 1, "loss": 2.0, "learning_rate": 0.1, "epoch": 0.1, "num_input_tokens_seen": 10,
    }  # fmt: skip
    assert state["log_history"][-1] == {"step": 2, **summary}
    assert (state["global_step"], state["best_global_step"], state["best_metric"]) == (2, 1, 1.5)
    write_results(path.parent, summary)
    results = json.loads((path.parent / "all_results.json").read_text())
    assert results == {"epoch": 0.2, "eval_loss": 1.75, "eval_runtime": 0.2, "train_loss": 1.5}
    assert last_line(path)["current_steps"] == 2
