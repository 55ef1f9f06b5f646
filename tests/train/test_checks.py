"""In bfloat16 too, the precision most train in, a start that would train wrongly is seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rollbook.errors import UsageError
from rollbook.sft.settings import load_settings
from rollbook.sft.train import train
from rollbook.train.batch import Example
from rollbook.train.checks import head_matches, in_float32, packing_keeps_apart
from rollbook.train.model import Model
from tiny_model import CHATML, LLAMA, make_tokenizer, write_config

CPU = torch.device("cpu")
SIZES = {key: value for key, value in LLAMA.items() if key != "model_type"}
QWEN_NEXT = SIZES | {
    "num_hidden_layers": 4, "head_dim": 16, "moe_intermediate_size": 32, "num_experts": 4,
    "num_experts_per_tok": 2, "shared_expert_intermediate_size": 32, "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
FALCON = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT_OSS = SIZES | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16}


def bfloat16(kind: str, **sizes: Any) -> Model:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config: Any = AutoConfig.for_model(kind, vocab_size=61, **sizes)
    return Model(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), tokenizer=None)


def samples() -> list[Example]:
    torch.manual_seed(1)
    made = [torch.randint(0, 61, (size,)).numpy().astype("int32") for size in (33, 40)]
    return [Example(tokens, tokens >= 0) for tokens in made]


@pytest.mark.parametrize(
    ("kind", "sizes", "message"),
    [
        ("qwen3_next", QWEN_NEXT, "differ by"),  # linear attention: the state runs on into the next sequence
        ("falcon", FALCON, "differ by"),  # its own attention
        ("gpt_oss", GPT_OSS, "does not know s_aux"),  # attention sinks
    ],
)
def test_rounding_does_not_hide_that_packing_goes_wrong(
    kind: str, sizes: dict[str, Any], message: str
) -> None:
    model = bfloat16(kind, **sizes)
    model.use_packing(True)
    problem = packing_keeps_apart(model, samples(), CPU)
    assert problem is not None and message in problem


def test_rounding_does_not_hide_a_head_that_does_more() -> None:
    model = bfloat16("gemma2", head_dim=16, **SIZES)
    assert not head_matches(model, samples(), CPU)
    assert head_matches(bfloat16("qwen3", head_dim=16, **SIZES), samples(), CPU)


def test_the_weights_are_what_they_were() -> None:
    model = bfloat16("llama", **SIZES)
    before = {name: value.clone() for name, value in model.model.state_dict().items()}
    buffers = {name: value.dtype for name, value in model.model.named_buffers()}
    with in_float32(model):
        assert {value.dtype for value in model.model.parameters()} == {torch.float32}
    for name, value in model.model.state_dict().items():
        assert value.dtype is before[name].dtype and torch.equal(value, before[name]), name
    assert {name: value.dtype for name, value in model.model.named_buffers()} == buffers


def said_by(config: Path, *words: str) -> list[str]:
    said: list[str] = []
    train(load_settings(config, words), config.parent / "artifacts", resume=False, log=said.append)
    return said


def test_samples_that_were_cut_off_are_no_reason_to_refuse(tmp_path: Path) -> None:
    config = write_config(tmp_path, data__eval=[], data__too_long="truncate", training__max_steps=1)
    long = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a" * 90}]}
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write(json.dumps(long) + "\n")
    assert any("truncated: 1" in line for line in said_by(config))
    (tmp_path / "train.jsonl").write_text(json.dumps(long) + "\n")
    said = said_by(config, "training.output_dir=all")
    assert any("every sample is cut off, so the model does not learn to stop" in line for line in said)


def test_who_generates_stops_where_the_replies_end(tmp_path: Path) -> None:
    """A base model's own end of text is often another token than the template's end of a turn."""
    config = write_config(tmp_path, data__eval=[], training__max_steps=1)
    template = CHATML.replace("<|im_end|>", "<|turn_end|>")
    make_tokenizer(tmp_path / "tokenizer", template)
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|turn_end|>"]})
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    assert any("replies end in '<|turn_end|>'" in line for line in said_by(config))
    saved = json.loads((tmp_path / "artifacts/model/demo/checkpoint-1/generation_config.json").read_text())[
        "eos_token_id"
    ]
    assert saved == [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|turn_end|>")]


def test_samples_longer_than_the_model_are_refused(tmp_path: Path) -> None:
    config = write_config(tmp_path, data__eval=[])
    with pytest.raises(UsageError, match="the model has 32 positions and the longest sample 34 tokens"):
        said_by(config, "model.config.max_position_embeddings=32")
