"""The losses of 50 steps of a tiny run, stored once: samples, packing and loss stay as they were.

`python tests/sft/losses_of_50_steps.py` writes the file again, after a change that is meant to change them.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rollbook.sft.settings import load_settings
from rollbook.sft.train import train
from tiny_model import write_config

STORED = Path(__file__).with_name("losses_of_50_steps.json")
RUNS: dict[str, list[str]] = {
    "packed": [],
    "padded": ["data.packing=off", "training.gradient_accumulation_steps=1"],
}


def losses(directory: Path, words: list[str]) -> list[list[float]]:
    """Step, loss and gradient norm of every step; step and loss of every evaluation."""
    write_config(
        directory,
        training__max_steps=50,
        training__save_steps=50,
        training__eval_steps=20,
        training__per_device_train_batch_size=2,
        training__gradient_accumulation_steps=2,
        training__learning_rate=0.001,
        training__warmup_steps=5,
        training__weight_decay=0.01,
        data__train=[
            {"path": str(directory / "train.jsonl")},
            {"path": str(directory / "more.jsonl"), "weight": 1.5},
        ],
    )
    (directory / "more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in _rows(41)))
    settings = load_settings(directory / "config.yaml", words)
    train(settings, directory / "artifacts", resume=False, log=lambda _: None)
    log = directory / "artifacts" / "model" / "demo" / "trainer_state.json"
    history = json.loads(log.read_text())["log_history"]
    names = ("loss", "grad_norm", "eval_loss")
    return [
        [point["step"], *(point[name] for name in names if name in point)]
        for point in history
        if {"loss", "eval_loss"} & point.keys()
    ]


def _rows(count: int) -> list[dict[str, Any]]:
    """Several turns, of any length that fits."""
    chance = random.Random(3)
    rows = []
    for _ in range(count):
        turns: list[dict[str, str]] = []
        for _ in range(chance.choice([1, 1, 2])):
            turns.append({"role": "user", "content": "q" * chance.randrange(1, 9)})
            turns.append({"role": "assistant", "content": "ab"[chance.randrange(2)] * chance.randrange(1, 9)})
        rows.append({"messages": turns})
    return rows


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        stored = {name: losses(Path(scratch) / name, words) for name, words in RUNS.items()}
    lines = [
        f' "{name}": [\n' + ",\n".join("  " + json.dumps(point) for point in points) + "\n ]"
        for name, points in stored.items()
    ]
    STORED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
