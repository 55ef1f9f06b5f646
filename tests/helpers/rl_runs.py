"""Runs of `rollbook rl` so small that each takes about a second: a tiny model, a few words, six iterations.

The model was not fine-tuned. Whatever it replies is graded by whether a vowel is in it, which about half of
the replies of random weights have, so that most groups are mixed and every iteration trains.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from helpers.self_kill import WATCH
from helpers.trainer import TrainingProcess, start_several
from rollbook.rl.settings import RlSettings, load_settings
from rollbook.runs.settings import merge
from rollbook.tiny import write_tiny_model

LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOWELS = list("aeiou")
TASKS, HELD_OUT = 40, 6


def write_setup(directory: Path) -> Path:
    """A model, tasks for training and for an evaluation; the directory is what `config_of` wants."""
    directory.mkdir(parents=True, exist_ok=True)
    write_tiny_model(directory / "model", LETTERS, hidden=32, heads=2, intermediate=64, positions=64)
    words = [_word(number) for number in range(TASKS + HELD_OUT)]
    _write_tasks(directory / "tasks.jsonl", words[:TASKS])
    _write_tasks(directory / "held-out.jsonl", words[TASKS:])
    return directory


def config_of(setup: Path, log_path: Path, **changes: Any) -> dict[str, Any]:
    """The config of a run, as YAML would give it; mappings among the changes are merged."""
    config = {
        "log_path": str(log_path),
        "seed": 3,
        "model": {"path": str(setup / "model"), "dtype": "float32"},
        "environments": [
            {"name": "dataset", "as": "vowels", "tasks": str(setup / "tasks.jsonl"), "grader": "contains"}
        ],
        "sampler": {"max_tokens": 6},
        "groups_per_batch": 4,
        "group_size": 4,
        "iterations": 6,
        "learning_rate": 1e-2,
        "evals": [
            {"name": "test", "environment": "vowels", "tasks": str(setup / "held-out.jsonl"), "every": 2}
        ],
        "save_every": 2,
        "num_groups_to_log": 2,
        "samples_every": 0,
    }
    return merge(config, changes)


def settings_of(setup: Path, log_path: Path, **changes: Any) -> RlSettings:
    return load_settings(config_of(setup, log_path, **changes))


def _word(number: int) -> str:
    return "".join(LETTERS[(number * 7 + place * place * 5 + place * number) % 26] for place in range(4))


def _write_tasks(path: Path, words: list[str]) -> None:
    rows = (
        {
            "id": f"{number}-{word}",
            "responses_create_params": {"input": [{"role": "user", "content": word}]},
            "expected_answer": VOWELS,
        }
        for number, word in enumerate(words)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def start(settings: RlSettings, *words: str, **watched: Any) -> TrainingProcess:
    """The process of `rollbook rl`, of a quick start; `watched` is given to `self_kill.watch`."""
    (process,) = start_all(settings, *words, **watched)
    return process


def start_all(settings: RlSettings, *words: str, rank: int = 0, **watched: Any) -> list[TrainingProcess]:
    """The processes of a run, as torchrun starts them; one of them is watched."""
    environment = {"ROLLBOOK_SETTINGS": msgspec.json.encode(settings).decode()}
    own = {WATCH: json.dumps({"root": settings.log_path} | watched, default=str)} if watched else {}
    artifacts = Path(settings.log_path).parent / "artifacts"
    words = ("--artifacts", str(artifacts), *words)
    if settings.processes == 1:
        return [TrainingProcess("helpers.killed_rl", *words, **environment, **own)]
    return start_several(settings.processes, "helpers.killed_rl", *words, own={rank: own}, **environment)


def finish(settings: RlSettings, *words: str, **watched: Any) -> str:
    """Runs it to its good end; returns what it printed."""
    with ExitStack() as opened:
        trainers = [opened.enter_context(trainer) for trainer in start_all(settings, *words, **watched)]
        codes = [trainer.wait() for trainer in trainers]
        output = "".join(trainer.output for trainer in trainers)
        assert not any(codes), f"{codes}:\n{output}"
        return output


CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
_LOOK = '''\
from rollbook.envs import Environment, Feedback, Opening

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


class Look(Environment):
    """Rewards an `a` in the answer, and a little each look before it; a `g` breaks it."""

    def start(self, task):
        self.looks = 0
        return Opening(messages=task.messages, tools=[TOOL])

    def step(self, message):
        calls = message.get("tool_calls")
        if calls and self.looks < 3:
            self.looks += 1
            answers = [{"role": "tool", "tool_call_id": call.get("id"), "content": "ab"} for call in calls]
            return Feedback(reward=0.1, done=False, messages=answers)
        if "g" in (message.get("content") or ""):
            raise RuntimeError("broken")
        return Feedback(reward=float("a" in (message.get("content") or "")))
'''


def write_tool_setup(directory: Path) -> dict[str, Any]:
    """What changes in `config_of` for episodes of several turns: a call of a tool is one token here."""
    directory.mkdir(parents=True, exist_ok=True)
    write_tiny_model(
        directory / "caller", "abcdefgh", pieces=[CALL], hidden=32, heads=2, intermediate=64, positions=96
    )
    (directory / "look.py").write_text(_LOOK)
    _write_tasks(directory / "look.jsonl", ["ab", "cd", "ef", "gh", "ad", "bc", "eh", "fg"])
    environment = {"name": f"{directory}/look.py:Look", "as": "look", "tasks": str(directory / "look.jsonl")}
    return {
        "model": {"path": str(directory / "caller")},
        "environments": [environment],
        "evals": [],
        "sampler": {"max_tokens": 8},
        "micro_batch_tokens": 64,
    }
