"""Killed at any point and resumed: the same weights and the same log as a run that nobody touched."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from rollbook.runs.saved_models import saved_models
from rollbook.train.settings import load_settings
from rollbook.train.sft import train
from tiny_model import write_config

STEPS = 20
STATE = ("model.safetensors", "optimizer.safetensors", "random_state.json")
TIMES = ("elapsed_time", "remaining_time", "throughput", "percentage")


def settings_file(directory: Path, **changes: Any) -> Path:
    config = write_config(
        directory,
        training__max_steps=STEPS,
        training__save_steps=4,
        training__gradient_accumulation_steps=2,
        **changes,
    )
    path = directory / "settings.json"
    path.write_bytes(msgspec.json.encode(load_settings(config)))
    return path


def start(directory: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "rollbook.train.main", "--settings", str(directory / "settings.json"),
         "--artifacts", str(directory / "artifacts"), *more],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def log_lines(directory: Path) -> list[dict[str, Any]]:
    path = directory / "artifacts" / "model" / "demo" / "trainer_log.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def final_files(directory: Path) -> dict[str, bytes]:
    path = directory / "artifacts" / "model" / "demo" / f"checkpoint-{STEPS}"
    return {name: (path / name).read_bytes() for name in STATE}


def wait_for_step(child: subprocess.Popen[str], step: int) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith(f"step {step}/"):
            return
    pytest.fail(f"it ended before step {step}")


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("untouched")
    settings_file(directory)
    child = start(directory)
    output, _ = child.communicate()
    assert child.returncode == 0, output
    return directory


def test_killed_three_times_it_ends_the_same(untouched: Path, tmp_path: Path) -> None:
    settings_file(tmp_path)
    chance = random.Random(time.time_ns())
    points = sorted(chance.sample(range(1, STEPS), 3))
    resumes: list[str] = []
    for point in points:
        child = start(tmp_path, *resumes)
        wait_for_step(child, point)
        time.sleep(chance.random() * 0.1)  # anywhere: in a step, in a save, between the two
        child.send_signal(signal.SIGKILL)
        child.wait()
        resumes = ["--resume"]
    child = start(tmp_path, *resumes)
    output, _ = child.communicate()
    assert child.returncode == 0, f"killed at {points}: {output}"
    assert log_lines(tmp_path) == log_lines(untouched), f"killed at {points}"
    assert final_files(tmp_path) == final_files(untouched), f"killed at {points}"


@pytest.mark.parametrize(
    "how",
    [  # half a minute each
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=pytest.mark.faults),
        pytest.param(signal.SIGHUP, marks=pytest.mark.faults),
    ],
)
def test_a_signal_saves_and_ends_resumable(untouched: Path, tmp_path: Path, how: signal.Signals) -> None:
    settings_file(tmp_path)
    child = start(tmp_path)
    wait_for_step(child, 6)
    child.send_signal(how)
    output, _ = child.communicate()
    assert child.returncode == 130, output
    assert "type the command with --resume" in output
    newest = saved_models(tmp_path / "artifacts/model/demo")[-1]
    assert newest.complete and newest.step >= 6
    child = start(tmp_path, "--resume")
    output, _ = child.communicate()
    assert child.returncode == 0, output
    assert log_lines(tmp_path) == log_lines(untouched)
    assert final_files(tmp_path) == final_files(untouched)


@pytest.mark.parametrize("kind", ["lora", "bfloat16"])
def test_adapters_and_bfloat16_resume_exactly_too(kind: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = (
        {"model__lora": {"rank": 4, "dropout": 0.1}} if kind == "lora" else {"model__dtype": "bfloat16"}
    )
    name = "adapter_model.safetensors" if kind == "lora" else "model.safetensors"
    ends = []
    base = write_base(tmp_path / "base")
    changes |= {"model__config": None, "model__path": str(base)}
    for place in ("whole", "halves"):
        directory = tmp_path / place
        settings_file(directory, **changes)
        settings = load_settings(directory / "config.yaml")
        if place == "halves":
            child = start(directory)
            wait_for_step(child, 9)
            child.kill()
            child.wait()
        train(settings, directory / "artifacts", resume=place == "halves", say=lambda _: None)
        ends.append((directory / "artifacts/model/demo" / f"checkpoint-{STEPS}" / name).read_bytes())
        loss = [line["loss"] for line in log_lines(directory) if "loss" in line]
        assert loss[-1] < loss[0] and len(loss) == STEPS
    assert ends[0] == ends[1]


def write_base(directory: Path) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    from tiny_model import LLAMA, VOCABULARY, make_tokenizer

    torch.manual_seed(1)
    values = {key: value for key, value in LLAMA.items() if key != "model_type"}
    AutoModelForCausalLM.from_config(
        AutoConfig.for_model("llama", vocab_size=VOCABULARY, **values)
    ).save_pretrained(directory)
    make_tokenizer(directory)
    return directory
