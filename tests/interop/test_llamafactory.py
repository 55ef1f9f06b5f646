"""LLaMA-Factory itself trains a tiny model from our settings, and its artifacts are read like our own."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from interop.setup_llamafactory import COMMAND, ENVIRONMENT
from rollbook.runs.handoff import resolve_checkpoint
from rollbook.runs.jobs.finish import result_values
from rollbook.runs.jobs.ledger import Ledger, RunEnd
from rollbook.runs.jobs.supervise import supervise
from rollbook.runs.plots import curves_of, draw
from rollbook.runs.saved_models import newest_model, saved_models
from rollbook.runs.status import read_status
from rollbook.sft.launch import plan_start, prepare_job
from rollbook.sft.llamafactory import llamafactory_environment
from rollbook.sft.settings import load_settings
from tiny_model import LLAMA, VOCABULARY, make_tokenizer, write_config

pytestmark = pytest.mark.interop


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights with its tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    path = tmp_path_factory.mktemp("model") / "base"
    torch.manual_seed(0)
    config: Any = AutoConfig.for_model(**{**LLAMA, "vocab_size": VOCABULARY})
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return make_tokenizer(path)


def config_of(directory: Path, base: Path, **changes: Any) -> Path:
    """15 steps an epoch, saved every 10."""
    settings: dict[str, Any] = {
        "engine": "llamafactory",
        "llamafactory": {"command": str(COMMAND), "template": "chatml"},
        "model": {"path": str(base), "dtype": "float32"},
        "training__num_train_epochs": 1,
        "training__save_steps": 10,
    }
    return write_config(directory, **(settings | changes))


def train(config: Path, *, resume: bool = False) -> tuple[RunEnd, Path]:
    assert ENVIRONMENT.is_ready(), "no LLaMA-Factory here; type: python tests/interop/setup_llamafactory.py"
    settings, artifacts = load_settings(config), config.parent / "artifacts"
    directory = settings.output_dir(artifacts)
    plan = plan_start(settings, artifacts, resume=resume, overwrite=False)
    job = prepare_job(plan, settings, artifacts, config, log=lambda _: None)
    job = msgspec.structs.replace(job, env=job.env | {"HF_HOME": str(config.parent / "cache")})
    end = supervise(job, terminal=None)
    log = max((artifacts / "logs").iterdir(), key=lambda path: path.stat().st_mtime)
    assert end.status == "completed", log.read_text(errors="replace")[-3000:]
    return end, directory


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, base: Path) -> tuple[RunEnd, Path, Path]:
    config = config_of(tmp_path_factory.mktemp("block"), base, training__eval_steps=5)
    return *train(config), config


def test_its_artifacts_are_those_of_any_run(trained: tuple[RunEnd, Path, Path]) -> None:
    end, directory, _ = trained
    assert {
        "checkpoint-10", "checkpoint-15", "trainer_log.jsonl", "trainer_state.json", "train_results.json",
        "all_results.json", "training_loss.png", "llamafactory.yaml",
    } <= {path.name for path in directory.iterdir()}  # fmt: skip
    status = read_status(directory)
    assert (status.step, status.total_steps, status.headline) == (15, 15, "loss")
    newest = newest_model(directory)
    assert newest is not None and (newest.step, newest.kind, newest.complete) == (15, "full", True)
    values = result_values(directory)
    results = json.loads((directory / "train_results.json").read_text())
    assert values["final_loss"] == results["train_loss"]
    losses = {curve.name: curve.values for curve in curves_of(directory)}["loss"]
    assert len(losses) == 15 and losses[-1] < losses[0] - 1
    assert values["last_loss"] == losses[-1]
    draw(curves_of(directory), directory / "drawn_by_us.png", "demo")
    assert end.metrics is not None and end.metrics["steps"] == 15
    for weights in directory.glob("checkpoint-*/*.safetensors"):
        assert weights.stat().st_mode & stat.S_IRGRP  # its library writes them for the owner alone


def test_the_history_and_the_handoff_name_its_checkpoint(trained: tuple[RunEnd, Path, Path]) -> None:
    _, directory, config = trained
    assert resolve_checkpoint(config) == directory / "checkpoint-15"
    output = yaml.safe_load(config.read_text())["runtime_info"]["output"]
    assert output["training_metrics"]["total_steps"] == 15
    assert config.read_text().startswith("# what we train\n")
    (record,) = Ledger(config.parent / "artifacts").records()
    assert (record.status, record.kind, record.name) == ("completed", "sft", "demo")
    assert record.checkpoint is not None and record.checkpoint["step"] == 15


def test_its_checkpoint_loads_and_generates_here(trained: tuple[RunEnd, Path, Path]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    checkpoint = resolve_checkpoint(trained[2])
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
    prompt = tokenizer("1+1?", return_tensors="pt")
    made = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert made.shape[1] > prompt["input_ids"].shape[1]


def test_a_resumed_run_ends_like_one_that_was_not_stopped(trained: tuple[RunEnd, Path, Path]) -> None:
    """As after a kill between step 10 and the end."""
    import shutil

    _, directory, config = trained
    before = json.loads((directory / "trainer_state.json").read_text())["log_history"]
    other = config.parent.parent / f"{config.parent.name}-resumed"
    shutil.copytree(config.parent, other)
    stopped = other / "artifacts" / "model" / "demo"
    shutil.rmtree(stopped / "checkpoint-15")
    for name in ("trainer_state.json", "train_results.json", "all_results.json", "training_loss.png"):
        (stopped / name).unlink()
    end, _ = train(other / "config.yaml", resume=True)
    assert end.checkpoint is not None and end.checkpoint["step"] == 15
    after = json.loads((stopped / "trainer_state.json").read_text())["log_history"]
    losses = [{row["step"]: row["loss"] for row in history if "loss" in row} for history in (before, after)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert read_status(stopped).step == 15


def test_adapters_packing_and_the_last_reply(tmp_path: Path, base: Path) -> None:
    end, directory = train(
        config_of(
            tmp_path,
            base,
            model={"path": str(base), "dtype": "float32", "lora": {"rank": 4}},
            data__packing="on",
            data__train_on="last",
            data__eval=[],
            training__max_steps=2,
        )
    )
    assert [(model.step, model.kind) for model in saved_models(directory)] == [(2, "adapter")]
    adapter = json.loads((directory / "checkpoint-2" / "adapter_config.json").read_text())
    assert (adapter["r"], adapter["lora_alpha"]) == (4, 8)
    assert {"q_proj", "down_proj"} <= set(adapter["target_modules"])
    assert end.metrics is not None and end.metrics["steps"] == 2


def test_several_processes(tmp_path: Path, base: Path) -> None:
    """Its launcher finds its own torchrun, wherever ours is."""
    end, directory = train(config_of(tmp_path, base, processes=2, training__max_steps=2, data__eval=[]))
    assert end.checkpoint is not None and end.checkpoint["step"] == 2
    assert (directory / "checkpoint-2" / "rng_state_1.pth").exists()
    assert (
        os.fspath(COMMAND.parent) in llamafactory_environment(load_settings(tmp_path / "config.yaml"))["PATH"]
    )


def test_the_command_runs_it(tmp_path: Path, base: Path) -> None:
    config_of(tmp_path, base, training__max_steps=3, training__save_steps=3, data__eval=[])

    def rollbook(*words: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"HF_HOME": str(tmp_path / "cache")}
        command = [sys.executable, "-m", "rollbook", *words]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    done = rollbook("sft", "config.yaml")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "handoff: written: checkpoint of step 3" in done.stderr
    assert json.loads(rollbook("status", "--json").stdout)["progress"]["step"] == 3
    assert rollbook("sft", "config.yaml").returncode == 2
    again = rollbook("sft", "config.yaml", "--overwrite")
    assert again.returncode == 0, again.stdout[-2000:] + again.stderr[-2000:]
    cut = rollbook("sft", "config.yaml", "data.too_long=drop", "--overwrite")
    assert cut.returncode == 2 and "data.too_long" in cut.stderr
