"""Two processes with FSDP2 on the CPU take the same steps as one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollbook.train.settings import load_settings
from tiny_model import write_config

TOLERANCE = 1e-4  # relative, in the loss of every step: sums in another order


def run(directory: Path, processes: int, rows: int, *more: str, **changes: Any) -> list[float]:
    config = write_config(
        directory,
        training__max_steps=8,
        training__save_steps=4,
        training__per_device_train_batch_size=rows,
        **changes,
    )
    (directory / "settings.json").write_bytes(msgspec.json.encode(load_settings(config)))
    own = [
        "-m",
        "rollbook.train.main",
        "--settings",
        str(directory / "settings.json"),
        "--artifacts",
        str(directory / "artifacts"),
    ]
    several = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        if processes > 1
        else []
    )
    done = subprocess.run(
        [sys.executable, *several, *own, *more], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = (directory / "artifacts/model/demo/trainer_log.jsonl").read_text().splitlines()
    return [
        json.loads(line)["loss"] for line in lines if "loss" in json.loads(line) and "eval_loss" not in line
    ]


def test_two_processes_take_the_steps_of_one(tmp_path: Path) -> None:
    alone = run(tmp_path / "one", 1, 4)
    together = run(tmp_path / "two", 2, 2)
    assert len(alone) == 8
    assert together == pytest.approx(alone, rel=TOLERANCE)
    from transformers import AutoModelForCausalLM

    models = [
        AutoModelForCausalLM.from_pretrained(
            tmp_path / name / "artifacts/model/demo/checkpoint-8"
        ).state_dict()
        for name in ("one", "two")
    ]
    for name, weight in models[0].items():
        assert weight.shape == models[1][name].shape
        assert (weight - models[1][name]).abs().max() < 1e-2, name

    # And going on from its checkpoint of step 4 gives the same again.
    import shutil

    shutil.rmtree(tmp_path / "two/artifacts/model/demo/checkpoint-8")
    resumed = run(tmp_path / "two", 2, 2, "--resume")
    assert resumed == pytest.approx(together, rel=1e-6)
