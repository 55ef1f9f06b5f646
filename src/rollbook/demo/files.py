"""The files that the demo begins with: ordinary ones, to be read, changed and used again.

The task is to write three letters backwards. The model is first shown both ways to answer: 35 % of its
examples write the letters backwards and 65 % copy them. Then only the right way earns a reward, and
reinforcement learning makes the model choose it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

LETTERS = "abcdefghijklmnopqrstuvwxyz"
LENGTH = 3
BACKWARDS_SHARE = 0.35
EXAMPLES = 20_000
TASKS, HELD_OUT = 4_000, 256


class DemoFiles(NamedTuple):
    directory: Path

    @property
    def model(self) -> Path:
        return self.directory / "tiny-model"

    @property
    def examples(self) -> Path:
        return self.directory / "examples.jsonl"

    @property
    def tasks(self) -> Path:
        return self.directory / "tasks.jsonl"

    @property
    def held_out(self) -> Path:
        return self.directory / "held-out.jsonl"

    @property
    def sft(self) -> Path:
        return self.directory / "sft.yaml"

    @property
    def rl(self) -> Path:
        return self.directory / "rl.yaml"

    @property
    def artifacts(self) -> Path:
        return self.directory / "artifacts"

    @property
    def run(self) -> Path:
        return self.directory / "run"


def write_files(directory: Path, *, seed: int = 0) -> DemoFiles:
    """Everything but the weights, which `rollbook sft` makes."""
    from rollbook.tiny import write_tiny_model

    files = DemoFiles(directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_tiny_model(files.model, LETTERS, seed=seed)
    chance = random.Random(seed)
    _write_lines(files.examples, (_example(_word(chance), chance) for _ in range(EXAMPLES)))
    words = _different_words(chance, TASKS + HELD_OUT)
    _write_lines(files.tasks, map(_task, words[:TASKS]))
    _write_lines(files.held_out, map(_task, words[TASKS:]))
    files.sft.write_text(_SFT.format(model=files.model, examples=files.examples, seed=seed))
    files.rl.write_text(
        _RL.format(sft=files.sft, run=files.run, tasks=files.tasks, held_out=files.held_out, seed=seed)
    )
    return files


_SFT = """\
# Shows the model both ways to answer. Run it with: rollbook sft THIS_FILE
name: tiny-sft
model:
  path: {model}
  dtype: float32
data:
  train: [{examples}]
  max_length: 64
training:
  output_dir: tiny-sft
  max_steps: 400
  per_device_train_batch_size: 10   # rows of 64 tokens, about 60 examples a step
  learning_rate: 5.0e-3
  warmup_steps: 10
  adam_beta2: 0.95
  logging_steps: 80
  save_steps: 400
  seed: {seed}
"""

_RL = """\
# Rewards one of the two ways. Run it with: rollbook rl THIS_FILE
log_path: {run}
seed: {seed}
model:
  from: {sft}          # the checkpoint that the fine-tuning handed over
  dtype: float32
environments:
  - {{name: dataset, as: backwards, tasks: {tasks}, grader: exact}}
sampler: {{kind: local, max_tokens: 8, temperature: 1.0}}
groups_per_batch: 32
group_size: 8
iterations: 60
learning_rate: 1.0e-3
warmup_steps: 5
loss: {{name: importance_sampling}}
advantage: mean
evals:
  - {{name: test, environment: backwards, tasks: {held_out}, every: 15, samples: 1, temperature: 1.0}}
save_every: 30
samples_every: 15
num_groups_to_log: 4
"""


def _word(chance: random.Random) -> str:
    return "".join(chance.choice(LETTERS) for _ in range(LENGTH))


def _different_words(chance: random.Random, count: int) -> list[str]:
    words: dict[str, None] = {}
    while len(words) < count:
        words[_word(chance)] = None
    return list(words)


def _example(word: str, chance: random.Random) -> dict[str, Any]:
    answer = word[::-1] if chance.random() < BACKWARDS_SHARE else word
    return {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": answer}]}


def _task(word: str) -> dict[str, Any]:
    return {
        "id": word,
        "responses_create_params": {"input": [{"role": "user", "content": word}]},
        "expected_answer": word[::-1],
    }


def _write_lines(path: Path, rows: Iterable[dict[str, Any]] | Iterator[dict[str, Any]]) -> None:
    with path.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
