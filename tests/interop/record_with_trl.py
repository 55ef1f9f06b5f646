"""Runs TRL's own SFTTrainer or GRPOTrainer on a tiny model, recorded; started by test_trl_recorded.py.

python record_with_trl.py (sft|grpo) DIRECTORY [CHECKPOINT]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny_model import LLAMA, VOCABULARY, make_tokenizer, sums

del sys.path[0]  # TRL would take the directory `vllm` there for vLLM

import torch  # noqa: E402
import trl  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: E402

import rollbook.recorder  # noqa: E402


def length_of(completions: list[Any], **_: Any) -> list[float]:
    """A reward that differs between random completions."""
    return [float(len(str(completion)) % 7) for completion in completions]


def prepare(directory: Path) -> str:
    """A model and its tokenizer in one directory, from which GRPO loads its reference model too; and data."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA, vocab_size=VOCABULARY))
    model.save_pretrained(directory / "model")
    make_tokenizer(directory / "model")
    (directory / "data").mkdir(exist_ok=True)
    (directory / "data/train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums(40)))
    return str(directory / "model")


def trainer_for(kind: str, directory: Path) -> Any:
    common: dict[str, Any] = {
        "output_dir": str(directory / kind),
        "max_steps": 4,
        "logging_steps": 1,
        "save_steps": 2,
        "learning_rate": 1e-3,
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
    }
    model = prepare(directory)
    tokenizer = AutoTokenizer.from_pretrained(model)
    if kind == "sft":
        return trl.SFTTrainer(
            model,
            trl.SFTConfig(**common, per_device_train_batch_size=2, max_length=64, report_to="none"),
            train_dataset=Dataset.from_list(sums(40)),
            eval_dataset=Dataset.from_list(sums(4)),
            processing_class=tokenizer,
            callbacks=[rollbook.recorder.Recorder(directory / "artifacts")],
        )
    rollbook.recorder.register()
    return trl.GRPOTrainer(
        model,
        length_of,
        trl.GRPOConfig(
            **common,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=8,
            beta=0.04,
            report_to="rollbook",
        ),
        train_dataset=Dataset.from_list([{"prompt": row["messages"][:1]} for row in sums(40)]),
        processing_class=tokenizer,
    )


if __name__ == "__main__":
    kind, directory, *checkpoint = sys.argv[1:]
    if kind == "prepare":
        prepare(Path(directory))
        sys.exit()
    trainer = trainer_for(kind, Path(directory))
    trainer.train(resume_from_checkpoint=checkpoint[0] if checkpoint else None)
    if kind == "sft":
        trainer.evaluate()
