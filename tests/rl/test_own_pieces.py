"""An environment, a loss and a policy of a user's own, against the public pieces alone, in real runs."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch

import rollbook
from helpers.rl_runs import LETTERS, write_setup
from rollbook.envs import Environment, Feedback, Opening, Task, single_turn
from rollbook.envs.source import open_environment
from rollbook.errors import UsageError
from rollbook.rollouts.episode import play
from rollbook.rollouts.runner import Done, run_all
from rollbook.rollouts.types import Completion, Request
from rollbook.train.losses import Loss, LossInputs, LossOutput, ratio_of, weighted_sum


class Hangman(Environment):
    """Find a letter of a secret word."""

    def __init__(self, tries: int = 3) -> None:
        self._left, self._word = tries, ""

    def start(self, task: Task) -> Opening:
        self._word = task.row["word"]
        return Opening(messages=task.messages)

    def step(self, message: dict[str, Any]) -> Feedback:
        self._left -= 1
        found = bool(set(message["content"]) & set(self._word))
        if found or self._left == 0:
            return Feedback(reward=float(found), metrics={"tries_left": self._left})
        return Feedback(done=False, messages=[{"role": "user", "content": "no"}])

    @classmethod
    def tasks(cls, count: int, seed: int = 0, **settings: Any) -> Any:
        chance = random.Random(seed)
        for number in range(count):
            word = "".join(chance.sample(LETTERS, 4))
            yield {"id": f"word-{seed}-{number}", "prompt": "letter", "word": word}


class Cispo(Loss, tag="cispo", frozen=True, kw_only=True):
    """-sg(min(r, most)) A log pi."""

    most: float = 2.0

    def __call__(self, given: LossInputs) -> LossOutput:
        ratio_N = ratio_of(given).ratio_N.detach()
        loss_N = -ratio_N.clamp(max=self.most) * given.column("advantage") * given.logprob_N
        return LossOutput(weighted_sum(loss_N, given), {"ratio": ratio_N, "capped": ratio_N > self.most})


class Alphabet:
    """A policy that says one letter after the other."""

    async def act(self, request: Request) -> Completion:
        return Completion(message={"role": "assistant", "content": LETTERS[request.turn]})

    async def close(self) -> None:
        return None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_setup(tmp_path_factory.mktemp("rl")) / "model"


def config_of(model: Path, run: Path, **changes: Any) -> dict[str, Any]:
    return {
        "log_path": str(run),
        "model": {"path": str(model), "dtype": "float32"},
        "environments": [{"name": Hangman, "tries": 2, "tasks": 30}],
        "sampler": {"max_tokens": 2},
        "groups_per_batch": 6,
        "group_size": 4,
        "iterations": 4,
        "learning_rate": 1e-3,
        "save_every": 2,
        "samples_every": 0,
        **changes,
    }


def quiet(_: str) -> None:
    return None


def test_a_run_with_an_environment_and_a_loss_of_ones_own(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    rollbook.rl(config_of(model, run), loss=Cispo(most=1.5), log=quiet)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 4
    assert any(row["optim/applied"] == 1.0 for row in rows)
    for row in rows:
        assert 0 < row["env/all/reward/total"] < 1 and 0 <= row["env/all/tries_left"] <= 1
        assert (row["loss/ratio"], row["loss/capped"], row["loss/ess"]) == pytest.approx((1.0, 0.0, 1.0))
    rollouts = list(rollbook.open_run(run).rollouts())
    assert {len(rollout.steps) for rollout in rollouts} == {1, 2}
    assert {tag for rollout in rollouts for tag in rollout.tags} == {"Hangman"}
    config = json.loads((run / "config.json").read_text())
    assert config["loss"] == {"name": "cispo", "most": 1.5}
    assert config["environments"][0]["settings"] == {"tries": 2}


def test_it_goes_on_with_the_same_pieces_and_refuses_others(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    rollbook.rl(config_of(model, run), loss=Cispo(), log=quiet)
    longer = config_of(model, run, iterations=6)
    with pytest.raises(UsageError, match=r"settings changed since it was started: loss\.most: 2\.0 -> 3\.0"):
        rollbook.rl(longer, loss=Cispo(most=3.0), resume=True, log=quiet)
    assert rollbook.rl(longer, loss=Cispo(), resume=True, log=quiet).iterations == 6
    with pytest.raises(UsageError, match=r"no loss 'cispo'; there are: .*ppo.* passed as an object"):
        rollbook.rl(run / "config.json", log=quiet)
    again = tmp_path / "again"
    rollbook.rl(run / "config.json", f"log_path={again}", loss=Cispo(), log=quiet)
    digests = [
        [record.weights_digest for record in rollbook.open_run(one).finished_iterations()]
        for one in (run, again)
    ]
    assert digests[0] == digests[1] and len(digests[0]) == 6


def test_a_grading_function_is_an_environment_too(model: Path, tmp_path: Path) -> None:
    @single_turn
    def vowels(task: Task, answer: str) -> float:
        return sum(letter in "aeiou" for letter in answer) / max(1, len(answer))

    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(
        "".join(json.dumps({"id": word, "prompt": word}) + "\n" for word in ("cat", "dog", "owl"))
    )
    config = config_of(
        model, tmp_path / "run", environments=[{"name": vowels, "tasks": str(tasks)}], iterations=1
    )
    assert rollbook.rl(config, log=quiet).reward is not None
    with pytest.raises(UsageError, match="str is not an Environment; subclass"):
        rollbook.rl(config_of(model, tmp_path / "other", environments=[str]), log=quiet)


def test_a_policy_of_ones_own_plays_it() -> None:
    """One letter after the other: the third try is `c`."""
    source = open_environment(Hangman)
    tasks = [source.task(row) for row in source.tasks(40)]

    async def played() -> dict[str, tuple[int, float | None]]:
        found = {}
        work = run_all(tasks, lambda task: play(source.make(), Alphabet(), task), concurrency=8)
        async with aclosing(work) as events:
            async for event in events:
                assert isinstance(event, Done)
                found[event.item.id] = len(event.result.turns), event.result.reward
        await source.close()
        return found

    found = asyncio.run(played())
    for task in tasks:
        first = min((LETTERS.index(letter) for letter in task.row["word"]), default=9)
        assert found[task.id] == (min(first + 1, 3), float(first < 3))


def test_a_loss_of_ones_own_is_its_formula() -> None:
    logprob_N = torch.tensor([-1.0, -2.0], requires_grad=True)
    columns_N = {"sampled_logprob": torch.tensor([-1.0, -3.0]), "advantage": torch.tensor([0.5, -1.0])}
    made = Cispo(most=1.5)(LossInputs(logprob_N, torch.zeros(2, dtype=torch.int64), columns_N))
    made.loss_sum.backward()
    assert logprob_N.grad is not None and logprob_N.grad.tolist() == [-0.5, 1.5]
    assert made.facts_N["capped"].tolist() == [False, True]
