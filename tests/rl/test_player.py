"""The player: how much is under way at once, what is kept, and where each rollout ends up."""

from __future__ import annotations

import asyncio
import json
import random
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import rollbook
from helpers.equal_runs import differences
from helpers.rl_runs import settings_of, write_setup
from rollbook.envs import Environment, Feedback
from rollbook.records import logtree
from rollbook.rl import player as players
from rollbook.rl.open_groups import GroupPlan
from rollbook.rl.player import Played, Player
from rollbook.rl.train import train
from rollbook.rollouts.retry import RetrySettings
from rollbook.rollouts.runner import run_all
from rollbook.rollouts.types import Completion, Message, Request, Task

TEXT = 10_000  # characters of a reply
AT_ONCE = 8


class Graded(Environment):
    """Ends its episodes in any order; every seventh task fails."""

    def start(self, task: Task) -> Any:
        self.number = int(task.id)
        return super().start(task)

    async def step(self, message: Message) -> Feedback:
        for _ in range(random.Random(self.number).randrange(5)):
            await asyncio.sleep(0)
        if self.number % 7 == 3:
            raise ValueError("a seventh one")
        logtree.text(f"graded {self.number}")
        return Feedback(reward=float(self.number % 2))


class Talking:
    async def act(self, request: Request) -> Completion:
        said = f"{request.messages[-1]['content']} " + "x" * TEXT
        return Completion(message={"role": "assistant", "content": said})

    async def close(self) -> None:
        return None


class Counted:
    """Takes rollouts, keeps nothing, and counts the groups that are open."""

    def __init__(self) -> None:
        self.open = self.most = self.begun = self.ended = 0
        self.node = logtree.NOWHERE

    @contextmanager
    def group(self, *_: object, size: int, **__: object) -> Iterator[Counted]:
        self.open += 1
        self.begun += 1
        self.most = max(self.most, self.open)
        yield self
        self.open -= 1

    def add(self, *_: object) -> None:
        self.ended += 1

    fail = add


def plans(count: int, size: int) -> Iterator[GroupPlan]:
    for number in range(count):
        asked = [{"role": "user", "content": str(number)}]
        yield GroupPlan(number, Task(str(number), {}, asked), size, number, Graded, 1, ("graded",))


def played(log: Any, count: int, size: int = 2, *, keep: bool = False) -> Played:
    with Player(RetrySettings(), at_once=AT_ONCE) as player:
        return player.groups(
            plans(count, size), Talking(), log, version=0, rollouts=count * size, stall_after_s=60.0,
            keep_episodes=keep,
        )  # fmt: skip


def test_what_is_open_and_what_is_kept_does_not_grow_with_the_tasks() -> None:
    log, count = Counted(), 1500
    tracemalloc.start()
    try:
        found = played(log, count)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (log.open, log.begun, log.ended) == (0, count, 2 * count)
    assert log.most <= AT_ONCE
    assert (found.groups, found.rollouts, found.failed) == ([], 2 * count, 2 * len(range(3, count, 7)))
    assert peak < 2 * count * TEXT / 4
    assert not found.all_failed
    assert found.why_failed.startswith(f"{found.failed} of {found.rollouts} rollouts failed: environment: ")


def test_episodes_that_are_kept_stand_by_group_and_rollout() -> None:
    found = played(Counted(), 20, 3, keep=True)
    assert [group.group_idx for group in found.groups] == list(range(20))
    for group in found.groups:
        if group.group_idx % 7 == 3:
            assert group.episodes == [None] * 3
        else:
            rewards = [episode.reward for episode in group.episodes if episode is not None]
            assert rewards == [group.group_idx % 2] * 3


def test_lines_are_in_order_and_what_an_environment_logs_stands_in_its_own_group(tmp_path: Path) -> None:
    count = 3 * AT_ONCE
    with rollbook.Run(tmp_path / "run", config={}, num_groups_to_log=count) as run:
        with run.rollouts(0) as log:
            played(log, count)
        assert log.metrics()["env/all/rollouts/expected"] == 2 * count
    for name in ("rollout_summaries", "transcripts"):
        lines = (tmp_path / f"run/train_iteration_000000_{name}.jsonl").read_text().splitlines()
        places = [(row["group_idx"], row["traj_idx"]) for row in map(json.loads, lines)]
        assert places == [(group, index) for group in range(count) for index in range(2)]
    tree = json.loads((tmp_path / "run/train_iteration_000000_logtree.json").read_text())
    sections = [node for node in tree["root"]["children"] if isinstance(node, dict)]
    sections = [node for node in sections if "data-group-idx" in node.get("attrs", {})]
    assert len(sections) == count
    for section in sections:
        number = int(section["attrs"]["data-group-idx"])
        told = json.dumps(section).count(f'graded {number}"')
        assert told == json.dumps(section).count("graded ") == (0 if number % 7 == 3 else 2)


def test_an_error_closes_the_groups_that_are_open_and_no_other(tmp_path: Path) -> None:
    class Full(Counted):
        """The disk is full at the tenth rollout."""

        failed = 0

        @contextmanager
        def group(self, *arguments: object, **named: Any) -> Iterator[Counted]:
            try:
                with super().group(*arguments, **named):
                    yield self
            except rollbook.RollbookError:
                self.failed += 1
                raise

        def add(self, *_: object) -> None:
            super().add()
            if self.ended == 10:
                raise rollbook.RollbookError("no space left")

        fail = add

    log = Full()
    with pytest.raises(rollbook.RollbookError, match="no space left"):
        played(log, 100)
    assert 0 < log.failed <= AT_ONCE and log.begun < 20


def test_most_rollouts_failed_with_what_most_of_them_said() -> None:
    found = Played([], 9, 0, 0, {"environment: one": 1, "timeout: two": 3, "environment: three": 3})
    assert found.why_failed == "7 of 9 rollouts failed: 3 times timeout: two"
    assert Played([], 2, 0, 0, {"a": 1, "b": 1}).why_failed == "2 of 2 rollouts failed: the first one a"
    assert Played([], 2, 0, 0, {"a": 2}).why_failed == "2 of 2 rollouts failed: a"
    assert Played([], 2, 0, 0, {"a": 2}).all_failed and not Played([], 0, 0, 0, {}).all_failed


def test_how_many_are_played_at_once_changes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation of 72 rollouts (two tasks are doubles), eight at a time and all of them at once."""
    setup = write_setup(tmp_path / "setup")
    evals = [{"name": "test", "environment": "vowels", "tasks": 20, "samples": 4, "temperature": 1.0}]
    given: dict[str, Any] = {"evals": evals, "iterations": 2, "sampler": {"slots": 2}}
    for name, at_once in (("few", 1), ("all", 80)):
        monkeypatch.setattr(players, "LEAST_AT_ONCE", at_once)
        train(settings_of(setup, tmp_path / name, **given), log=lambda _: None)
    assert differences(tmp_path / "few", tmp_path / "all") == []
    lines = (tmp_path / "few/eval_test_iteration_000000_transcripts.jsonl").read_text().splitlines()
    assert len(lines) == 72


def test_as_many_are_played_as_the_slots_that_were_chosen_can_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slots are chosen after the player was opened, and must not be kept waiting by it."""
    seen: list[int] = []

    def spied(*given: Any, concurrency: int, **more: Any) -> Any:
        seen.append(concurrency)
        return run_all(*given, concurrency=concurrency, **more)

    monkeypatch.setattr(players, "run_all", spied)
    changes: dict[str, Any] = {"groups_per_batch": 12, "group_size": 8, "iterations": 1, "evals": []}
    train(settings_of(write_setup(tmp_path / "setup"), tmp_path / "run", **changes), log=lambda _: None)
    assert seen == [4 * 12 * 8]
