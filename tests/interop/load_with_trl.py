"""Runs in TRL's environment: `sft|dpo MODEL FILE SCRATCH` through `datasets` and one step of TRL's trainer.

Prints one JSON line: the rows as `datasets` gives them, the samples the trainer made of them, and its loss;
for sft also the rows as they come in small blocks, with their features named.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import datasets
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

SFT_FEATURES = datasets.Features(
    {
        "messages": datasets.List(datasets.Json()),
        "tools": datasets.List(datasets.Json()),
        "task_id": datasets.Value("string"),
        "reward": datasets.Value("float64"),
        "rollout": datasets.Value("string"),
    }
)


def main(kind: str, model: str, file: str, scratch: str) -> None:
    rows = datasets.load_dataset("json", data_files=file, split="train", cache_dir=f"{scratch}/cache")
    usual: dict[str, Any] = {
        "output_dir": f"{scratch}/{kind}", "max_steps": 1, "max_length": 2048, "use_cpu": True, "bf16": False,
        "per_device_train_batch_size": 4, "report_to": "none", "save_strategy": "no", "logging_steps": 1,
    }  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(model)
    trainer: Any
    if kind == "sft":
        trainer = SFTTrainer(model, SFTConfig(**usual), train_dataset=rows, processing_class=tokenizer)
        ids = [[sample["input_ids"]] for sample in trainer.train_dataset]
    else:
        trainer = DPOTrainer(model, args=DPOConfig(**usual), train_dataset=rows, processing_class=tokenizer)
        ids = [
            [sample["prompt_ids"] + sample[f"{side}_ids"] for side in ("chosen", "rejected")]
            for sample in trainer.train_dataset
        ]
    loss = trainer.train().training_loss
    texts = [[tokenizer.decode(one) for one in sample] for sample in ids]
    found = {"rows": list(rows), "samples": texts, "loss": loss}
    if kind == "sft":
        named = {"features": SFT_FEATURES, "chunksize": 1024, "cache_dir": f"{scratch}/named"}
        found["in_blocks"] = list(datasets.load_dataset("json", data_files=file, split="train", **named))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
