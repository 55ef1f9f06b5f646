"""Runs in LLaMA-Factory's environment: `MODEL DIRECTORY DATASET sft|rm` through its own loader.

Prints one JSON line: what became of each sample, as text, with what is learned of it.
"""

from __future__ import annotations

import json
import sys

from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
from llamafactory.hparams import get_train_args
from llamafactory.model import load_tokenizer


def main(model: str, directory: str, dataset: str, stage: str) -> None:
    arguments = {
        "model_name_or_path": model, "stage": "sft" if stage == "sft" else "dpo", "do_train": True,
        "finetuning_type": "full", "dataset": dataset, "dataset_dir": directory, "template": "qwen3",
        "cutoff_len": 4096, "output_dir": f"{directory}/out", "report_to": "none",
    }  # fmt: skip
    model_args, data_args, training_args, _, _ = get_train_args(arguments)
    loaded = load_tokenizer(model_args)
    tokenizer = loaded["tokenizer"]
    template = get_template_and_fix_tokenizer(tokenizer, data_args)
    samples = get_dataset(template, model_args, data_args, training_args, stage=stage, **loaded)[
        "train_dataset"
    ]
    sides = [""] if stage == "sft" else ["chosen_", "rejected_"]
    print(
        json.dumps(
            [
                [
                    [tokenizer.decode(sample[f"{side}input_ids"]), tokenizer.decode(_learned(sample, side))]
                    for side in sides
                ]
                for sample in samples
            ]
        )
    )


def _learned(sample: dict[str, list[int]], side: str) -> list[int]:
    return [token for token in sample[f"{side}labels"] if token >= 0]


if __name__ == "__main__":
    main(*sys.argv[1:])
