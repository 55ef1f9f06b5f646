"""A tiny model learns to use a tool: a multi-turn run with calls, from a fine-tuning on both ways to answer.

The fine-tuning shows a call of the calculator in three of ten traces; in the others the first number of the
problem is answered at once, which is seldom right. Rewards then make the model call the tool.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

import rollbook
from rollbook.envs.calculator import TOOL, Calculator
from rollbook.records.turns import token_rows
from rollbook.rl.train import RlResult
from rollbook.tiny import write_tiny_model

pytestmark = pytest.mark.model

CALLS_SHARE = 0.3
CALL_BEGINS, CALL_ENDS = '{"name": "calculator", "arguments": {"expression": "', '"}}'
ENVIRONMENT: dict[str, Any] = {"operations": 1, "digits": 1, "prompt": "{problem}"}
SFT = """\
model: {{path: {model}, dtype: float32}}
data: {{train: [{traces}], max_length: 64}}
training:
  output_dir: {directory}
  max_steps: 300
  per_device_train_batch_size: 40
  learning_rate: 5.0e-3
  warmup_steps: 20
  adam_beta2: 0.99
  logging_steps: 100
"""


def quiet(_: str) -> None:
    return None


def trace(row: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    problem = row["responses_create_params"]["input"][0]["content"]
    asked = {"role": "user", "content": problem}
    function = {"name": "calculator", "arguments": json.dumps({"expression": problem})}
    call = {"id": "call", "type": "function", "function": function}
    if chance.random() < CALLS_SHARE:
        said = [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call", "content": row["expected_answer"]},
            {"role": "assistant", "content": row["expected_answer"]},
        ]
    else:
        said = [{"role": "assistant", "content": problem.split()[0]}]
    return {"messages": [asked, *said], "tools": [TOOL]}


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a model to which the marks and the words of a call are single tokens."""
    directory = tmp_path_factory.mktemp("calculator")
    pieces = [CALL_BEGINS, CALL_ENDS, "calculator", " + ", " - ", " * "]
    write_tiny_model(directory / "model", "-0123456789", pieces=pieces, layers=3, heads=8)
    chance = random.Random(0)
    rows = [trace(row, chance) for row in Calculator.tasks(6000, 0, **ENVIRONMENT)]
    (directory / "traces.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = {"model": directory / "model", "traces": directory / "traces.jsonl"}
    (directory / "sft.yaml").write_text(SFT.format(directory=directory / "tuned", **paths))
    rollbook.sft(directory / "sft.yaml", artifacts=directory / "artifacts", log=quiet)
    return directory / "tuned/checkpoint-300"


@pytest.fixture(scope="module")
def result(tuned: Path, tmp_path_factory: pytest.TempPathFactory) -> RlResult:
    config = {
        "log_path": str(tmp_path_factory.mktemp("rl") / "run"),
        "model": {"path": str(tuned), "dtype": "float32"},
        "environments": [{"name": "calculator", "tasks": 2000, **ENVIRONMENT}],
        "sampler": {"max_tokens": 16},
        "groups_per_batch": 32,
        "group_size": 8,
        "iterations": 25,
        "learning_rate": 3e-4,
        "warmup_steps": 5,
        "evals": [
            {"name": "test", "environment": "calculator", "tasks": 64, "samples": 4, "temperature": 1.0}
        ],
        "save_every": 25,
        "samples_every": 0,
    }
    return rollbook.rl(config, log=quiet)


def test_it_learns_to_call_the_tool(result: RlResult) -> None:
    rows = [json.loads(line) for line in (result.log_path / "metrics.jsonl").read_text().splitlines()]
    before, after = rows[0], rows[-1]
    assert before["test/env/all/reward/total"] < 0.5 and after["test/env/all/reward/total"] > 0.9
    assert before["test/env/all/tool_calls"] < 0.5 and after["test/env/all/tool_calls"] > 0.9
    assert (result.log_path / "alerts.jsonl").read_text() == ""
    assert all(row["kl_sample_train_v3"] < 1e-9 for row in rows[:-1])


def test_turns_and_what_the_tool_said_stand_in_the_record(result: RlResult) -> None:
    """One row of tokens per rollout, of which the tool's answer is a part that nobody sampled."""
    run = rollbook.open_run(result.log_path)
    calls = [told for told in run.transcripts(24, "train") if len(told.to_turns()) == 2]
    assert len(calls) > 200
    for told in calls:
        first, second = told.to_turns()
        (row,) = token_rows([first, second])
        assert first.finish_reason == "tool_calls" and first.reply["tool_calls"]
        answer = first.messages[1]
        assert answer["role"] == "tool"
        assert 1 <= len(second.token_ids or ()) <= 16
        assert sum(row.sampled) == len(first.token_ids or ()) + len(second.token_ids or ())
        assert second.prompt_token_ids and len(second.prompt_token_ids) >= len(answer["content"])
