"""Killed at any point and resumed: the same weights and the same log as a run that nobody touched."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from helpers.trainer import TrainingProcess
from rollbook.records.run_info import read_run_info
from rollbook.runs.saved_models import saved_models
from rollbook.sft.settings import load_settings
from rollbook.sft.train import train
from tiny_model import write_config

STEPS = 20
STATE = ("model.safetensors", "optimizer.safetensors", "random_state.json")
TIMES = ("elapsed_time", "remaining_time", "throughput", "elapsed_s", "logged_at")
EVAL_TIMES = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second")


def configure(directory: Path, **changes: Any) -> None:
    write_config(
        directory,
        training__max_steps=STEPS,
        training__save_steps=4,
        training__gradient_accumulation_steps=2,
        **changes,
    )


def start(directory: Path, *more: str) -> TrainingProcess:
    settings = msgspec.json.encode(load_settings(directory / "config.yaml")).decode()
    words = ["--artifacts", str(directory / "artifacts"), *more]
    return TrainingProcess("rollbook.sft.main", *words, ROLLBOOK_SETTINGS=settings)


def log_lines(directory: Path) -> list[dict[str, Any]]:
    """Of both logs, without what takes another time in every run."""
    output = directory / "artifacts" / "model" / "demo"
    lines = [
        json.loads(line)
        for name in ("trainer_log.jsonl", "metrics.jsonl")
        for line in (output / name).read_text().splitlines()
    ]
    return [{key: value for key, value in line.items() if key not in TIMES + EVAL_TIMES} for line in lines]


def final_files(directory: Path) -> dict[str, bytes]:
    path = directory / "artifacts" / "model" / "demo" / f"checkpoint-{STEPS}"
    return {name: (path / name).read_bytes() for name in STATE}


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("untouched")
    configure(directory)
    with start(directory) as trainer:
        assert trainer.wait() == 0, trainer.output
    return directory


def reached(step: int) -> str:
    """The first line of a trainer that is as far as this step, or was before it was started."""
    later = "|".join(map(str, range(step, STEPS + 1)))
    return rf"step ({later})/|resuming from .*checkpoint-({later})$"


def test_killed_three_times_it_ends_the_same(untouched: Path, tmp_path: Path) -> None:
    configure(tmp_path)
    chance = random.Random(time.time_ns())
    points = sorted(chance.sample(range(1, STEPS), 3))
    resumes: list[str] = []
    for point in points:
        with start(tmp_path, *resumes) as trainer:
            trainer.wait_for(reached(point))
            time.sleep(chance.random() * 0.1)  # anywhere: in a step, in a save, between the two
            trainer.send_signal(signal.SIGKILL)
            assert trainer.wait() in (-signal.SIGKILL, 0), trainer.output
        resumes = ["--resume"]
    with start(tmp_path, *resumes) as trainer:
        assert trainer.wait() == 0, f"killed at {points}: {trainer.output}"
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
    configure(tmp_path)
    with start(tmp_path) as trainer:
        trainer.wait_for("step 6/")
        trainer.send_signal(how)
        assert trainer.wait() == 130, trainer.output
        assert "checkpoint saved; continue with --resume" in trainer.output
    newest = saved_models(tmp_path / "artifacts/model/demo")[-1]
    assert newest.complete and newest.step >= 6
    attempt = read_run_info(tmp_path / "artifacts/model/demo/run.json").attempts[-1]
    assert attempt.outcome == "interrupted"
    with start(tmp_path, "--resume") as trainer:
        assert trainer.wait() == 0, trainer.output
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
        configure(directory, **changes)
        settings = load_settings(directory / "config.yaml")
        if place == "halves":
            with start(directory) as trainer:
                trainer.wait_for("step 9/")
                trainer.send_signal(signal.SIGKILL)
                trainer.wait()
        train(settings, directory / "artifacts", resume=place == "halves", log=lambda _: None)
        ends.append((directory / "artifacts/model/demo" / f"checkpoint-{STEPS}" / name).read_bytes())
        loss = [line["loss"] for line in log_lines(directory) if "lr" in line]
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
