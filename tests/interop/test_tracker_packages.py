"""wandb, trackio and tensorboard really record a run, in an environment where they are installed."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
from pathlib import Path

import pytest

from interop.setup_trackers import TRACKERS

pytestmark = pytest.mark.interop

LOOP = """
import sys, rollbook
with rollbook.Run("runs/tracked", config={"lr": 0.1}, trackers=sys.argv[1:]) as run:
    for step in range(20):
        run.log_metrics({"loss": 1 / (step + 1)}, step)
print(run.id)
"""


def record(directory: Path, *trackers: str) -> str:
    assert TRACKERS.is_ready(), "no tracker environment; type: make test-interop"
    home = {"HOME": str(directory), "WANDB_MODE": "offline", "TRACKIO_DIR": str(directory / "trackio")}
    result = subprocess.run(
        [str(TRACKERS.python), "-c", LOOP, *trackers],
        cwd=directory,
        env={"PATH": os.environ["PATH"], **home},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    alerts = (directory / "runs/tracked/alerts.jsonl").read_text()
    assert alerts == "", alerts
    info = json.loads((directory / "runs/tracked/run.json").read_text())
    run_id = result.stdout.split()[-1]
    assert info["trackers"] == dict.fromkeys(trackers, run_id)
    return run_id


def test_wandb_offline(tmp_path: Path) -> None:
    run_id = record(tmp_path, "wandb")
    (directory,) = (tmp_path / "runs/tracked/wandb").glob("offline-run-*")
    assert directory.name.endswith(run_id)
    (log,) = directory.glob("*.wandb")
    assert log.stat().st_size > 1000


def test_trackio(tmp_path: Path) -> None:
    run_id = record(tmp_path, "trackio")
    (database,) = (tmp_path / "trackio").rglob("*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select step, metrics from metrics where run_name = ?", [run_id]).fetchall()
    losses = {step: json.loads(metrics)["loss"] for step, metrics in rows}
    assert losses == {step: pytest.approx(1 / (step + 1)) for step in range(20)}


def test_tensorboard(tmp_path: Path) -> None:
    record(tmp_path, "tensorboard")
    code = """
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator("runs/tracked/tensorboard"); events.Reload()
print(len(events.Scalars("loss")))
"""
    result = subprocess.run([str(TRACKERS.python), "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert result.stdout.split() == ["20"], result.stderr
