"""The tiny model is a model directory like any other."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollbook.policies.chat_format import ChatFormat
from rollbook.tiny import write_tiny_model

CALL = '{"name": "calculator", "arguments": {"expression": "'
TOOL = {"type": "function", "name": "calculator", "parameters": {}}


def test_a_tiny_model_is_read_and_runs(tmp_path: Path) -> None:
    directory = write_tiny_model(
        tmp_path / "a", "0123456789+= ", pieces=[CALL, '"}}', "calculator"], hidden=32
    )
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    chat = ChatFormat(tokenizer)
    prompt = chat.prompt([{"role": "user", "content": "1+2"}], [TOOL])
    assert [tokenizer.decode([number]) for number in prompt] == [
        "<|system|>", "calculator", "<|im_end|>", "<|user|>", "1", "+", "2", "<|im_end|>", "<|assistant|>"
    ]  # fmt: skip
    logits = model(input_ids=torch.tensor([prompt])).logits
    assert logits.shape == (1, len(prompt), len(tokenizer)) and torch.isfinite(logits).all()
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    call = ["<tool_call>", CALL, "1", "+", "2", '"}}', "</tool_call>", "<|im_end|>"]
    ids = tokenizer("".join(call))["input_ids"]
    assert [tokenizer.decode([number]) for number in ids] == call
    message, broken = chat.parse(ids, prompt_ids=prompt, tools=[TOOL])
    assert not broken
    assert message["tool_calls"][0]["function"]["arguments"] == '{"expression": "1+2"}'


def test_its_weights_follow_from_the_seed(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    made = [
        (write_tiny_model(tmp_path / name, "ab", seed=seed, layers=1) / "model.safetensors").read_bytes()
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    assert made[0] == made[1] != made[2]
    assert torch.equal(before, torch.get_rng_state())
