"""Two processes with FSDP2 on the CPU take the same steps as one."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from safetensors.torch import load_file

from helpers.trainer import TrainingProcess, start_several
from helpers.without_weights import LARGEST_FILE, VARIABLE
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


def start_two(directory: Path, *more: str, without_weights: int = 1, **changes: Any) -> list[TrainingProcess]:
    """One of them can read no file of weights: the second, where nothing else is said."""
    words = ["rollbook.sft.main", "--artifacts", str(directory / "artifacts"), *more]
    own = {without_weights: {VARIABLE: "1"}}
    return start_several(
        2, "helpers.without_weights", *words, own=own, **settings_for(directory, 2, **changes)
    )


def two(directory: Path, *more: str, **changes: Any) -> list[float]:
    """Those of a run of two processes, of which only the first reads weights."""
    assert ended(start_two(directory, *more, **changes)).codes == [0, 0]
    return losses(directory)


class Ended(NamedTuple):
    codes: list[int]
    outputs: list[str]


def ended(trainers: list[TrainingProcess]) -> Ended:
    with ExitStack() as opened:
        for trainer in trainers:
            opened.enter_context(trainer)
        codes = [trainer.wait() for trainer in trainers]
        outputs = [trainer.output for trainer in trainers]
    print(*outputs)
    return Ended(codes, outputs)


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


@pytest.mark.parametrize("why", ["truncated", pytest.param("forbidden", marks=pytest.mark.faults)])
def test_weights_that_cannot_be_read_end_both_with_one_message(tmp_path: Path, why: str) -> None:
    here(tmp_path / "base", 4, training__max_steps=1)
    base = tmp_path / "base/artifacts/model/demo/checkpoint-1"
    given = {"model__config": None, "model__path": str(base), "data__eval": []}
    if why == "truncated":
        os.truncate(base / "model.safetensors", 5000)
        codes, outputs = ended(start_two(tmp_path / "two", **given))
    else:  # which shows that nobody could read a file of weights in the tests above
        codes, outputs = ended(start_two(tmp_path / "two", without_weights=0, **given))
    assert codes == [2, 0]
    assert outputs[0].startswith(f"rollbook: model: {base}: ") and len(outputs[0].splitlines()) == 1
    assert outputs[1] == ""


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("float32", marks=pytest.mark.faults),
        "bfloat16",
        pytest.param("adapters", marks=pytest.mark.faults),
    ],
)
def test_a_run_goes_on_with_more_or_fewer_processes(tmp_path: Path, kind: str) -> None:
    """As long as its steps have the same rows: 4 of one process are 2 of each of two."""
    changes: dict[str, Any] = {"data__eval": []}
    if kind == "adapters":
        here(tmp_path / "base", 4, training__max_steps=1, **changes)
        changes["model__path"] = str(tmp_path / "base/artifacts/model/demo/checkpoint-1")
        changes |= {"model__config": None, "model__lora": {"rank": 4, "dropout": 0.1}}
    else:
        changes["model__dtype"] = kind
    whole = here(tmp_path / "whole", 4, **changes)
    within = pytest.approx(whole, rel={"float32": TOLERANCE, "bfloat16": 3e-2, "adapters": 0.2}[kind])
    tensors = contents_of(tmp_path / "whole/artifacts/model/demo/checkpoint-8")

    here(tmp_path / "more", 4, **changes)
    shutil.rmtree(tmp_path / "more/artifacts/model/demo/checkpoint-8")
    assert two(tmp_path / "more", "--resume", **changes) == within
    assert contents_of(tmp_path / "more/artifacts/model/demo/checkpoint-8") == tensors

    assert two(tmp_path / "fewer", **changes) == within
    shutil.rmtree(tmp_path / "fewer/artifacts/model/demo/checkpoint-8")
    settings_for(tmp_path / "fewer", 4, **changes)
    said: list[str] = []
    settings = load_settings(tmp_path / "fewer/config.yaml")
    train(settings, tmp_path / "fewer/artifacts", resume=True, log=said.append)
    assert "changed since it was saved: processes: 2 -> 1" in said
    assert losses(tmp_path / "fewer") == within
    assert contents_of(tmp_path / "fewer/artifacts/model/demo/checkpoint-8") == tensors


def contents_of(checkpoint: Path) -> dict[str, Any]:
    """The names, shapes and types of all tensors, and of its config what says that."""
    found: dict[str, Any] = {}
    for path in checkpoint.glob("*.safetensors"):
        found[path.name] = {name: (tensor.shape, tensor.dtype) for name, tensor in load_file(path).items()}
    config = checkpoint / "config.json"
    return found | ({"dtype": json.loads(config.read_text())["dtype"]} if config.exists() else {})


@pytest.mark.faults
def test_other_rows_per_step_are_refused_with_the_setting_that_keeps_them(tmp_path: Path) -> None:
    here(tmp_path, 4, training__max_steps=4, data__eval=[])
    codes, outputs = ended(
        start_two(tmp_path, "--resume", data__eval=[], training__per_device_train_batch_size=1)
    )
    assert codes == [2, 0] and outputs[1] == ""
    assert "processes: 1 -> 2 changed since it was saved. Undo the change (with training." in outputs[0]
    assert "gradient_accumulation_steps: 2 a step has 4 rows, as it had)" in outputs[0]


@pytest.mark.faults
def test_a_run_that_diverges_ends_both_with_one_message(tmp_path: Path) -> None:
    changes = {"training__learning_rate": 1e30, "training__warmup_steps": 1, "data__eval": []}
    codes, outputs = ended(start_two(tmp_path, **changes))
    assert codes == [1, 0] and outputs[1] == ""
    assert outputs[0].splitlines()[-1].startswith("rollbook: the run has diverged: 4 of the last 5 ")


@pytest.mark.faults
def test_a_full_disk_ends_both_with_one_message(tmp_path: Path) -> None:
    """In the middle of a save, in which all take part."""
    words = ("rollbook.sft.main", "--artifacts", str(tmp_path / "artifacts"))
    settings = settings_for(tmp_path, 2, data__eval=[])
    own = {0: {LARGEST_FILE: "200000"}}
    codes, outputs = ended(start_several(2, "helpers.without_weights", *words, own=own, **settings))
    assert codes == [1, 0] and outputs[1] == ""
    assert re.match(
        "rollbook: the checkpoint could not be written to .* bytes left", outputs[0].splitlines()[-1]
    )
    assert not list((tmp_path / "artifacts/model/demo").glob("*checkpoint-4*"))


@pytest.mark.faults
def test_the_launcher_adds_nothing_to_that_message(tmp_path: Path) -> None:
    """`rollbook sft` starts the processes by torchrun, whose last word would be a traceback of its own."""
    settings = settings_for(tmp_path, 2, model__config=None, model__path=str(tmp_path), processes=2)
    command = [sys.executable, "-m", "rollbook.sft.main", "--artifacts", str(tmp_path / "artifacts")]
    found = subprocess.run(command, capture_output=True, text=True, env=os.environ | settings)
    assert found.returncode == 2 and found.stdout == ""
    assert found.stderr.startswith(f"rollbook: model.path {tmp_path}: it holds no config.json; ")
    assert len(found.stderr.splitlines()) == 1


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
