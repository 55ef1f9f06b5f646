"""A real instruction model fine-tuned for a few steps on the CPU, by the command, and used afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from models.setup_smollm2 import MODEL, is_ready

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not is_ready(), reason="no SmolLM2 here; type: make test-model"),
]
STEPS = 6


def write_config(directory: Path, **model: Any) -> None:
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What is {number} plus {number}?"},
                {"role": "assistant", "content": f"The sum is {2 * number}, says the book."},
            ]
        }
        for number in range(24)
    ]
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "model": {"path": str(MODEL), "dtype": "float32", **model},
        "data": {"train": ["train.jsonl"], "max_length": 128},
        "training": {
            "output_dir": "small",
            "max_steps": STEPS,
            "per_device_train_batch_size": 2,
            "learning_rate": 2e-4,
            "lr_scheduler_type": "constant",
            "warmup_steps": 1,
            "save_steps": 3,
        },
    }
    (directory / "config.yaml").write_text(json.dumps(settings))


def rollbook(directory: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "rollbook", *words],
        cwd=directory,
        env=os.environ | {"OMP_NUM_THREADS": "2"},  # a real model is worth both cores
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_it_learns_a_phrase(kind: str, tmp_path: Path) -> None:
    write_config(tmp_path, **({"lora": {"rank": 8}} if kind == "lora" else {}))
    shown = rollbook(tmp_path, "sft", "config.yaml", "--dry-run")
    assert "[[The sum is 0, says the book.<|im_end|>]]" in shown
    print(rollbook(tmp_path, "sft", "config.yaml"))
    output = tmp_path / "artifacts" / "model" / "small"
    lines = [json.loads(line) for line in (output / "trainer_log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == STEPS
    assert losses[-1] < 0.75 * losses[0], losses
    if kind == "full":
        from transformers import AutoModelForCausalLM, AutoTokenizer

        path = output / f"checkpoint-{STEPS}"
        model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
        asked = tokenizer.apply_chat_template(
            [{"role": "user", "content": "What is 7 plus 7?"}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        answer = model.generate(**asked, max_new_tokens=24, do_sample=False)
        assert "sum is" in tokenizer.decode(answer[0, asked["input_ids"].shape[1] :])
