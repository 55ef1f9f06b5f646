"""Datasets made from rollouts are what their readers make of them: `datasets`, TRL and LLaMA-Factory."""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from interop import setup_llamafactory, setup_trl
from rollbook.data.pairs import pairs
from rollbook.data.sft import sft
from rollout_rows import message, read, rollout, tool_use, write_rows
from tiny_model import LLAMA, VOCABULARY, make_tokenizer

pytestmark = pytest.mark.interop
HERE = Path(__file__).parent
TOOLS = [
    {"type": "function", "name": "calculator", "description": "Computes.",
     "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}}},
    {"type": "function", "name": "weather",
     "parameters": {"type": "object",
                    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}},
    {"type": "function", "name": "now"},
]  # fmt: skip
WEATHER = [
    {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Bern", "days": 3}'},
    {"type": "function_call_output", "call_id": "c1", "output": "sun"},
    message("Sunny."),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    path = tmp_path_factory.mktemp("model") / "tiny"
    config: Any = AutoConfig.for_model(**{**LLAMA, "vocab_size": VOCABULARY, "max_position_embeddings": 4096})
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return make_tokenizer(path)


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plain answers first, then reasoning, tools with differing arguments, and text beside a call."""
    rows = [rollout(f"plain{task}", repeat, 1.0 - repeat) for task in range(6) for repeat in range(2)]
    for task in range(3):
        with_tools = [
            rollout(f"tool{task}", 0, 1.0, output=tool_use(f"it {task}")),
            rollout(f"tool{task}", 1, 0.5, output=WEATHER),
            rollout(f"text{task}", 0, 0.5, output=[message("I will look."), *WEATHER]),
        ]
        for row in with_tools:
            row["responses_create_params"] |= {"tools": TOOLS, "instructions": "Use your tools."}
        rows += with_tools
    return write_rows(tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl", rows)


def run(python: Path, script: str, *words: object, cache: Path) -> Any:
    assert python.exists(), "an environment is missing; type: make test-interop"
    result = subprocess.run(
        [python, HERE / script, *map(str, words)],
        env={**os.environ, "HF_HOME": str(cache), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


def without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """A column that other rows have is null here; nothing inside of a column may be."""
    return {key: value for key, value in row.items() if value is not None}


def test_trl_trains_on_conversations(tmp_path: Path, model: Path, rollouts: Path) -> None:
    made = sft([rollouts], tmp_path / "sft.jsonl")
    rows = read(tmp_path / "sft.jsonl")
    assert made.rows_out == len(rows) == 21
    python = setup_trl.TRL.python
    found = run(python, "load_with_trl.py", "sft", model, tmp_path / "sft.jsonl", tmp_path, cache=tmp_path)
    assert [without_nulls(row) for row in found["rows"]] == rows
    assert [without_nulls(row) for row in found["in_blocks"]] == rows
    assert math.isfinite(found["loss"])
    texts = [text for (text,) in found["samples"]]
    assert len(texts) == 21 and all(text.count("<|im_start|>assistant") for text in texts)
    assert sum('"arguments": {"expression": "2+2"}}' in text for text in texts) == 3
    assert sum('I will look.<tool_call>{"name": "weather"' in text for text in texts) == 3
    assert sum("<think>think it 1</think>" in text for text in texts) == 1


def test_trl_trains_on_pairs(tmp_path: Path, model: Path, rollouts: Path) -> None:
    pairs([rollouts], tmp_path / "pairs.jsonl")
    rows = read(tmp_path / "pairs.jsonl")
    python = setup_trl.TRL.python
    found = run(python, "load_with_trl.py", "dpo", model, tmp_path / "pairs.jsonl", tmp_path, cache=tmp_path)
    assert [without_nulls(row) for row in found["rows"]] == rows and len(rows) == 9
    assert len(found["samples"]) == 9 and math.isfinite(found["loss"])
    for row, (chosen, rejected) in zip(rows, found["samples"], strict=True):
        assert chosen != rejected
        assert row["chosen"][-1]["content"] in chosen and row["rejected"][-1]["content"] in rejected


def test_llamafactory_reads_conversations(tmp_path: Path, model: Path, rollouts: Path) -> None:
    made = sft([rollouts], tmp_path / "lf" / "v1.5.jsonl", as_format="llamafactory")
    assert made.rows_out == 21
    words = (model, tmp_path / "lf", "v1.5", "sft")
    python = setup_llamafactory.ENVIRONMENT.python
    samples = run(python, "load_with_llamafactory.py", *words, cache=tmp_path)
    assert len(samples) == 21
    for ((text, learned),), row in zip(samples, read(tmp_path / "lf" / "v1.5.jsonl"), strict=True):
        assert learned.endswith("<|im_end|>\n") and row["conversations"][0]["value"] in text
        assert ("Use your tools." in text) == bool(row["tools"])
        assert ('"city": {"type": "string"}' in text) == bool(row["tools"])
        assert "detailed thinking" not in text
    replies = [sides[0][1] for sides in samples]
    assert sum('"arguments": {"expression": "2+2"}' in reply for reply in replies) == 3
    assert sum("I will look.<tool_call>" in reply for reply in replies) == 3
    assert sum("<think>\nthink it 1\n</think>" in reply for reply in replies) == 1
    assert not any("null" in reply for reply in replies)


def test_llamafactory_reads_pairs(tmp_path: Path, model: Path, rollouts: Path) -> None:
    made = pairs([rollouts], tmp_path / "lf" / "pairs.jsonl", as_format="llamafactory")
    # Its layout has one turn on either side, so rollouts that use tools are left out, and counted.
    assert (made.rows_out, made.counts["llamafactory_reply_of_several_turns"]) == (6, 9)
    words = (model, tmp_path / "lf", "pairs", "rm")
    python = setup_llamafactory.ENVIRONMENT.python
    samples = run(python, "load_with_llamafactory.py", *words, cache=tmp_path)
    assert len(samples) == 6
    for place, ((_, chosen), (_, rejected)) in enumerate(samples):
        assert f"plain{place} by try 0" in chosen and f"plain{place} by try 1" in rejected
