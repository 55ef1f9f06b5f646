"""Two processes with FSDP2 on the CPU take the same steps as one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers.trainer import run_several
from rollbook.runs.saved_models import newest_model
from rollbook.sft.settings import load_settings
from rollbook.sft.train import train
from tiny_model import write_config

TOLERANCE = 1e-4  # relative, in the loss of every step: sums in another order


def settings_for(directory: Path, rows: int, **changes: Any) -> dict[str, str]:
    """As the environment of a process that trains has them."""
    settings: dict[str, Any] = {
        "training__max_steps": 8,
        "training__save_steps": 4,
        "training__per_device_train_batch_size": rows,
    }
    config = write_config(directory, **(settings | changes))
    return {"ROLLBOOK_SETTINGS": msgspec.json.encode(load_settings(config)).decode()}


def two(directory: Path, *more: str, **changes: Any) -> list[float]:
    words = ["--artifacts", str(directory / "artifacts"), *more]
    run_several(2, "rollbook.sft.main", *words, **settings_for(directory, 2, **changes))
    return losses(directory)


def here(directory: Path, rows: int, **changes: Any) -> list[float]:
    """The same in this process, which has imported everything already."""
    settings_for(directory, rows, **changes)
    train(load_settings(directory / "config.yaml"), directory / "artifacts", log=lambda _: None)
    return losses(directory)


def losses(directory: Path) -> list[float]:
    lines = (directory / "artifacts/model/demo/trainer_log.jsonl").read_text().splitlines()
    return [
        json.loads(line)["loss"] for line in lines if "loss" in json.loads(line) and "eval_loss" not in line
    ]


def test_two_processes_take_the_steps_of_one(tmp_path: Path) -> None:
    alone = here(tmp_path / "one", 4)
    together = two(tmp_path / "two")
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
    shutil.rmtree(tmp_path / "two/artifacts/model/demo/checkpoint-8")
    resumed = two(tmp_path / "two", "--resume")
    assert resumed == pytest.approx(together, rel=1e-6)


def test_adapters_of_two_processes_are_those_of_one(tmp_path: Path) -> None:
    here(tmp_path / "base", 4, training__max_steps=1)
    base = tmp_path / "base/artifacts/model/demo/checkpoint-1"
    lora: dict[str, Any] = {
        "model__config": None, "model__path": str(base), "model__lora": {"rank": 4}, "data__eval": [],
    }  # fmt: skip
    alone = here(tmp_path / "one", 4, **lora)
    together = two(tmp_path / "two", **lora)
    assert together == pytest.approx(alone, rel=TOLERANCE)
    from peft import AutoPeftModelForCausalLM

    for name in ("one", "two"):
        path = tmp_path / name / "artifacts/model/demo/checkpoint-8"
        adapted = AutoPeftModelForCausalLM.from_pretrained(path).state_dict()
        assert any(weight.abs().sum() > 0 for key, weight in adapted.items() if "lora_B" in key)
    shutil.rmtree(tmp_path / "two/artifacts/model/demo/checkpoint-8")
    assert two(tmp_path / "two", "--resume", **lora) == pytest.approx(together, rel=1e-6)


def test_a_signal_to_one_process_stops_all_of_them_after_the_same_step(tmp_path: Path) -> None:
    """Started as `rollbook sft` does, by torchrun, which waits for them as they save."""
    settings = settings_for(
        tmp_path, 2, training__max_steps=4000, training__save_steps=4000, data__eval=[], processes=2
    )
    child = subprocess.Popen(
        [sys.executable, "-m", "rollbook.sft.main", "--artifacts", str(tmp_path / "artifacts")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | settings,
    )
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith("step 3/"):
            break
    workers = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
    os.kill(int(workers[-1]), signal.SIGTERM)
    try:
        output, _ = child.communicate(timeout=120)
    finally:
        child.kill()
    newest = newest_model(tmp_path / "artifacts/model/demo")
    assert newest is not None, output
    assert f"stopped after step {newest.step}, checkpoint saved" in output
