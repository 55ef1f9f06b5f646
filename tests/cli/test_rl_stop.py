"""`rollbook rl` in the background, and `rollbook stop`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.rl_runs import config_of, write_setup
from rollbook.cli.main import main
from rollbook.records.checkpoints import read_checkpoints
from rollbook.rl.settings import load_settings
from rollbook.rl.train import train
from rollbook.runs.jobs.ledger import Ledger

PATIENCE_S = 120.0
MANY = 100_000


def call(*words: object) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main([str(word) for word in words])


def wait_for_lines(path: Path, count: int) -> None:
    end = time.monotonic() + PATIENCE_S
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert time.monotonic() < end, f"{path} never had {count} lines"
        time.sleep(0.05)


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.faults)])
def test_stop_saves_and_resume_continues(tmp_path: Path, processes: int) -> None:
    setup, run, artifacts = write_setup(tmp_path / "setup"), tmp_path / "run", tmp_path / "artifacts"
    changes: dict[str, Any] = {"iterations": MANY, "save_every": MANY, "evals": [], "processes": processes}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(config_of(setup, run, **changes)))
    call("rl", config, "--detach", "--artifacts", artifacts)
    wait_for_lines(run / "metrics.jsonl", 2)
    call("stop", "run", "--artifacts", artifacts)
    record = Ledger(artifacts).get("run")
    assert (record.status, record.exit_code, record.signal) == ("interrupted", 130, "SIGTERM")
    (saved,) = read_checkpoints(run / "checkpoints.jsonl")
    done = saved.record.batch
    assert done is not None and done >= 2 and record.checkpoint == {
        "path": str(run / f"checkpoints/{done:06d}"),
        "step": done,
    }  # fmt: skip
    if processes == 1:
        train(load_settings(config, [f"iterations={done + 1}"]), resume=True, log=lambda _: None)
    else:
        call("rl", config, f"iterations={done + 1}", "--resume", "--artifacts", artifacts)
    finished = [json.loads(line)["iteration"] for line in (run / "iterations.jsonl").open()]
    assert finished == list(range(done + 1))
