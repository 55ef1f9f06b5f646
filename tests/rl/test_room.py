"""How long a sequence may be is decided from what there is to say, once, and by the memory that is free."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import rollbook
from helpers.rl_runs import LETTERS, config_of, write_setup
from rollbook.errors import UsageError
from rollbook.rl import room
from rollbook.rl.opening import open_sampler, open_trainer
from rollbook.rl.settings import SamplerSettings, load_settings
from rollbook.rl.start import Start
from rollbook.rl.tasks import read_pools
from rollbook.rl.train import train
from rollbook.tiny import CHAT_TEMPLATE, write_tiny_model
from rollbook.train.memory import cache_bytes
from rollbook.train.processes import Processes

TURNS, SAID = 12, "a longer message of the user"
ENVIRONMENTS = f'''\
import random

from rollbook.envs import Environment, Feedback, Opening, single_turn


class Talk(Environment):
    """Says the same thing to every reply but the last."""

    def __init__(self):
        self.turns = 0

    def step(self, message):
        self.turns += 1
        if self.turns == {TURNS}:
            return Feedback(reward=float("a" in message["content"]))
        return Feedback(done=False, messages=[{{"role": "user", "content": "{SAID}"}}])


class Rules(Talk):
    """Opens with rules that are in no task."""

    async def start(self, task):
        return Opening(messages=[{{"role": "system", "content": "rules " * 50}}, *task.messages])


class Chance(Talk):
    """Opens with a letter of the generator that everybody shares."""

    def start(self, task):
        letter = chr(97 + random.randrange(26))
        return Opening(messages=[*task.messages, {{"role": "user", "content": letter}}])


class Broken(Talk):
    def start(self, task):
        raise KeyError("no such thing")


@single_turn
def vowels(task, answer):
    return any(letter in "aeiou" for letter in answer)
'''


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_setup(tmp_path_factory.mktemp("room"))
    (directory / "envs.py").write_text(ENVIRONMENTS)
    small = {"hidden": 32, "heads": 2, "intermediate": 64}
    write_tiny_model(directory / "long", f"{LETTERS} ", positions=4096, **small)
    return directory


def config(setup: Path, name: str, run: str = "run", **changes: Any) -> dict[str, Any]:
    environment = {"name": f"{setup / 'envs.py'}:{name}", "as": "it", "tasks": str(setup / "tasks.jsonl")}
    given = {"environments": [environment], "evals": [], "model": {"path": str(setup / "long")}}
    sampler = {"sampler": {"max_tokens": 8}, "groups_per_batch": 2, "group_size": 2, "iterations": 1}
    return config_of(setup, setup / run, **(given | sampler | changes))


def decided(given: dict[str, Any]) -> tuple[SamplerSettings, str]:
    """The sampler's settings, and what is said of them."""
    lines: list[str] = []
    settings, trainer = open_trainer(Start(load_settings(given), False), Processes(), lambda _: None)
    tasks = read_pools(settings, lambda _: None)
    with open_sampler(settings, trainer, tasks, lines.append) as (settings, *_):
        return settings.sampler, "\n".join(lines)


def test_an_episode_of_many_turns_has_room_for_all_of_them(setup: Path) -> None:
    train(load_settings(config(setup, "Talk", "talk")), log=lambda _: None)
    run = rollbook.open_run(setup / "talk")
    assert {len(rollout.steps) for rollout in run.rollouts(0)} == {TURNS}
    (row,) = run.metrics.by_step()
    assert row["truncated/episode"] == 0 and row["truncated/reply"] > 0
    length = run.config["sampler"]["max_length"]
    assert TURNS * (8 + len(SAID)) < length < 4096
    assert rollbook.audit(setup / "talk").verdict == "balanced"


def test_too_short_a_length_is_told_from_too_short_replies(setup: Path) -> None:
    """And the audit counts both again."""
    given = config(setup, "Talk", "short", sampler={"max_tokens": 8, "max_length": 64})
    lines: list[str] = []
    train(load_settings(given), log=lines.append)
    (row,) = rollbook.open_run(setup / "short").metrics.by_step()
    assert row["truncated/episode"] == row["truncated/share"] == 1.0
    (alert,) = [line for line in lines if "run out of room" in line]
    assert alert.endswith("raise sampler.max_length (64), or set truncated: mask")
    assert rollbook.audit(setup / "short").verdict == "balanced"
    path = setup / "short" / "metrics.jsonl"
    line = json.loads(path.read_text())
    for key in ("truncated/episode", "truncated/reply"):
        path.write_text(json.dumps(line | {key: 0.123}) + "\n")
        assert key in {finding.key for finding in rollbook.audit(setup / "short").findings}


@pytest.mark.parametrize("environment", ["vowels", "dataset", "arithmetic"])
def test_one_reply_keeps_a_sequence_short_whatever_max_turns_says(setup: Path, environment: str) -> None:
    given = config(setup, "vowels")
    if environment == "arithmetic":
        given["environments"] = [{"name": "arithmetic", "prompt": "{problem}"}]
    elif environment == "dataset":
        given["environments"][0] |= {"name": "dataset", "grader": "contains"}
    sampler, said = decided(given)
    assert (sampler.max_length, sampler.slots) == (64, 4)
    assert "sampler.max_length is 64 tokens per sequence" in said and "turns" not in said


def test_max_turns_and_the_longest_replies_of_an_evaluation_count(setup: Path) -> None:
    given = config(setup, "Talk")
    few = {**given["environments"][0], "max_turns": 2}
    assert (decided(given | {"environments": [few]})[0].max_length or 0) < 256
    held_out = str(setup / "held-out.jsonl")
    long_eval = {"name": "test", "environment": "it", "tasks": held_out, "max_tokens": 300}
    assert (decided(given | {"environments": [few], "evals": [long_eval]})[0].max_length or 0) > 1200


def test_the_longest_prompt_is_found_wherever_it_stands(setup: Path) -> None:
    tasks = setup / "one-is-long.jsonl"
    words = [*["ab"] * 1500, "a b " * 100, *["cd"] * 100]
    rows = ({"id": f"{number}", "prompt": word} for number, word in enumerate(words))
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = config(setup, "vowels")
    given["environments"][0]["tasks"] = str(tasks)
    sampler, said = decided(given)
    assert "a prompt of 403 and a reply of 8" in said
    assert sampler.max_length == 512


def test_what_an_environment_opens_with_counts(setup: Path) -> None:
    sampler, said = decided(config(setup, "Rules"))
    assert "it: a prompt of 309 and 16 turns, each with a reply of 8 and a message of 64" in said
    assert sampler.max_length == 1600  # 309 and a quarter of it, 16 times 72; as the next 64 has it
    assert (decided(config(setup, "Broken"))[0].max_length or 0) < 1600  # its rollouts will say what is wrong


def test_a_task_that_cannot_be_rendered_is_left_to_its_rollouts(setup: Path) -> None:
    tasks, template = setup / "odd.jsonl", setup / "odd.jinja"
    rows = [{"id": "odd", "prompt": "odd " * 30}, {"id": "even", "prompt": "even"}]
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    refusal = "{% if 'odd' in messages[0].content %}{{ raise_exception('odd') }}{% endif %}"
    template.write_text(refusal + CHAT_TEMPLATE)
    given = config(setup, "vowels", model={"path": str(setup / "long"), "chat_template": str(template)})
    given["environments"][0]["tasks"] = str(tasks)
    assert "it: a prompt of 7 and a reply of 8" in decided(given)[1]


def test_a_model_that_is_too_short_is_said_with_what_is_left_for_a_reply(setup: Path) -> None:
    given = config(setup, "vowels", model={"path": str(setup / "model")}, sampler={"max_tokens": 500})
    sampler, said = decided(given)
    assert sampler.max_length == 64
    assert "64 tokens per sequence, all that the model takes; 512 were wanted" in said
    assert (
        "after the longest prompt of it a reply has room for 57 tokens, not for the 500 of max_tokens" in said
    )
    given["environments"][0]["system"] = "x" * 80
    assert "has 89 tokens, which leaves none for a reply: rollouts of such tasks fail" in decided(given)[1]
    given["sampler"]["max_episode_tokens"] = 30
    assert "30 tokens per sequence, as sampler.max_episode_tokens says" in decided(given)[1]


def test_memory_that_is_short_takes_slots_before_it_takes_length(
    setup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = config(setup, "Talk", groups_per_batch=16)
    plenty, said = decided(given)
    length = plenty.max_length or 0
    assert plenty.slots == 32 and "there is no memory" not in said
    _, trainer = open_trainer(Start(load_settings(given), False), Processes(), lambda _: None)
    base = trainer.model.base
    one = cache_bytes(base.config, base.dtype, length) or 0
    training = trainer.optimizer.bytes_to_come

    def free(slots: float) -> None:
        monkeypatch.setattr(room, "free_bytes", lambda _: int(training + slots * one))

    free(11)  # of which a fifth is for other things
    few, said = decided(given)
    assert (few.slots, few.max_length) == (8, length)
    assert "sampler.slots is 8 sequences at once, with " in said and "for 32 there is no memory" in said
    given["sampler"]["slots"] = 32  # by hand
    short, said = decided(given)
    assert short.slots == 32 and 64 <= (short.max_length or 0) <= 0.8 * 11 / 32 * length
    assert f"all that fits into memory; {length:,} were wanted" in said
    free(0.01)
    with pytest.raises(UsageError, match=r"not enough memory: .* lower sampler\.slots"):
        decided(given)


def test_looking_at_what_an_environment_opens_with_leaves_no_trace(setup: Path) -> None:
    """A run with the settings of another one, which were decided there, is shown the same."""
    given = config(setup, "Chance", "first", group_size=4)
    given["environments"][0]["max_turns"] = 1
    train(load_settings(given), log=lambda _: None)
    train(load_settings(setup / "first/config.json", [f"log_path={setup / 'second'}"]), log=lambda _: None)
    shown = [
        [rollout.messages for rollout in rollbook.open_run(setup / run).transcripts(0)]
        for run in ("first", "second")
    ]
    assert shown[0] == shown[1] and len({str(messages[1]) for messages in shown[0]}) > 1


def test_it_is_decided_once_and_kept_by_a_resume_and_by_a_rerun(
    setup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = config(setup, "Talk", "kept", groups_per_batch=4)
    given["environments"][0]["max_turns"] = 3
    train(load_settings(given), log=lambda _: None)
    before = rollbook.open_run(setup / "kept").config["sampler"]
    monkeypatch.setattr(room, "_LEAST_SAID", 1)
    monkeypatch.setattr(room, "_MOST_SLOTS", 2)
    assert decided(given)[0].max_length != before["max_length"]
    train(load_settings(given | {"iterations": 2}), resume=True, log=lambda _: None)
    again = load_settings(setup / "kept/config.json", [f"log_path={setup / 'again'}"])
    train(again, log=lambda _: None)
    for run in ("kept", "again"):
        assert rollbook.open_run(setup / run).config["sampler"] == before
