"""A tokenizer, a chat template and a model small enough to train in seconds, made on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
VOCABULARY = 320


def make_tokenizer(directory: Path, template: str = CHATML) -> Path:
    """Every byte is a token, so any text can be written; ChatML marks its turns."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: place for place, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = template
    fast.save_pretrained(directory)
    return directory


def sums(count: int, start: int = 0) -> list[dict[str, Any]]:
    """Conversations that a tiny model can learn by heart."""
    rows = []
    for number in range(start, start + count):
        a, b = number % 7, number % 5
        rows.append(
            {
                "messages": [
                    {"role": "user", "content": f"{a}+{b}?"},
                    {"role": "assistant", "content": f"It is {a + b}."},
                ]
            }
        )
    return rows


def write_config(directory: Path, **changes: Any) -> Path:
    """A config.yaml for `rollbook sft` with its data and tokenizer beside it; dotted keys change settings."""
    directory.mkdir(parents=True, exist_ok=True)
    make_tokenizer(directory / "tokenizer")
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums(60)))
    (directory / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums(10, 100)))
    settings: dict[str, Any] = {
        "model": {
            "config": {**LLAMA, "vocab_size": VOCABULARY},
            "tokenizer": str(directory / "tokenizer"),
            "dtype": "float32",
        },
        "data": {
            "train": [{"path": str(directory / "train.jsonl")}],
            "eval": [{"path": str(directory / "eval.jsonl")}],
            "max_length": 64,
        },
        "training": {
            "output_dir": "demo",
            "num_train_epochs": 4,
            "per_device_train_batch_size": 4,
            "learning_rate": 0.01,
            "save_steps": 8,
        },
    }
    for key, value in changes.items():
        place = settings
        *path, last = key.split("__")
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    path = directory / "config.yaml"
    path.write_text(
        "# what we train\n" + json.dumps({"runtime_info": {"input": settings, "output": {}}}, indent=1)
    )
    return path
