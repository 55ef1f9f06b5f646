"""Collections from a mapping, with a policy and an environment that the caller passes as objects."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

import rollbook
from collecting import assert_exactly_once, expected_keys, results, small_input
from rollbook.envs import Environment, Feedback, single_turn
from rollbook.errors import UsageError
from rollbook.records.turns import Usage
from rollbook.rollouts.types import Completion, Opening, Request, Task


class Adder:
    """A policy that adds up the numbers of the question."""

    def __init__(self, bias: int = 0) -> None:
        self.bias, self.asked, self.closed = bias, 0, 0

    async def act(self, request: Request) -> Completion:
        self.asked += 1
        question = str(request.messages[-1]["content"])
        numbers = [int(word) for word in question.replace("?", " ").split() if word.isdigit()]
        return Completion(
            message={"role": "assistant", "content": f"It is {sum(numbers) + self.bias}."},
            usage=Usage(input_tokens=len(question), output_tokens=4),
        )

    async def close(self) -> None:
        self.closed += 1


class Twice(Environment):
    """Asks again once; a setting is the reward of each answer."""

    def __init__(self, worth: float = 0.5) -> None:
        self.worth, self.turn = worth, 0

    def step(self, message: dict[str, Any]) -> Feedback:
        self.turn += 1
        again = [{"role": "user", "content": "Sure? 1 1"}]
        return Feedback(reward=self.worth, done=self.turn == 2, messages=again)


class Plain:
    """What EnvironmentProtocol asks for, and no more."""

    def start(self, task: Task) -> Opening:
        return Opening(messages=task.messages)

    def step(self, message: dict[str, Any]) -> Feedback:
        return Feedback(reward=0.75)

    def close(self) -> None:
        return None


@single_turn
def polite(task: Task, answer: str) -> bool:
    return answer.startswith("It is")


def config(directory: Path, **more: Any) -> dict[str, Any]:
    small_input(directory, 5)
    return {
        "agent_name": "a",
        "agents": {"a": {"env": {"name": "arithmetic"}, "policy": {"kind": "scripted", "script": ["no"]}}},
        "input_jsonl_fpath": directory / "in.jsonl",
        "output_jsonl_fpath": str(directory / "out.jsonl"),
        **more,
    }


def meaning(directory: Path) -> dict[str, Any]:
    manifest = orjson.loads((directory / "out_manifest.json").read_bytes())
    agent: dict[str, Any] = manifest["meaning"]["agent"]
    return agent


def quiet(_: str) -> None:
    return None


def test_a_mapping_is_a_config_and_words_stand_on_top_of_it(tmp_path: Path) -> None:
    given = config(tmp_path, limit=2)
    assert rollbook.collect(given, log=quiet).done == 2
    assert rollbook.collect(given, "limit=5", log=quiet).done == 5
    assert given["limit"] == 2
    with pytest.raises(UsageError, match=r"unknown key 'limt'; did you mean 'limit'\?"):
        rollbook.collect({**given, "limt": 3})


def test_a_policy_object_answers_in_place_of_the_configs(tmp_path: Path) -> None:
    adder = Adder()
    progress = rollbook.collect(config(tmp_path), policy=adder, log=quiet)
    assert (progress.status, progress.done, progress.reward_mean) == ("completed", 5, 1.0)
    assert (adder.asked, adder.closed) == (5, 1)
    assert_exactly_once(tmp_path / "out.jsonl", expected_keys(5))
    answers = [row["response"]["output"][0]["content"][0]["text"] for row in results(tmp_path / "out.jsonl")]
    assert all(answer.startswith("It is ") for answer in answers)
    assert meaning(tmp_path)["policy"]["kind"] == f"{__name__}:Adder"
    assert meaning(tmp_path)["policy"]["source_sha256"]


def test_an_environment_class_is_enough_of_an_agent(tmp_path: Path) -> None:
    given = {key: value for key, value in config(tmp_path).items() if not key.startswith("agent")}
    progress = rollbook.collect(given, policy=Adder, environment=Twice, log=quiet)
    assert (progress.done, progress.reward_mean) == (5, 1.0)
    assert {row["num_turns"] for row in results(tmp_path / "out.jsonl")} == {2}
    assert meaning(tmp_path)["env"]["name"] == f"{__name__}:Twice"
    assert rollbook.collect(given, policy=Adder, environment=Twice, log=quiet).done_before == 5
    with pytest.raises(UsageError, match=r"meaning.agent.env.name: was '.*:Twice', now '.*:polite'"):
        rollbook.collect(given, policy=Adder, environment=polite, log=quiet)


@pytest.mark.parametrize(("kind", "reward"), [(Twice, 0.5), (Plain, 0.75), (polite, 1.0)])
def test_classes_and_objects_stand_in_a_mapping_too(kind: Any, reward: float, tmp_path: Path) -> None:
    env = {"name": kind, "worth": 0.25} if kind is Twice else kind
    agents = {"a": {"env": env, "policy": Adder()}, "other": {"env": polite, "policy": Adder}}
    progress = rollbook.collect(config(tmp_path, agents=agents), log=quiet)
    assert (progress.done, progress.reward_mean) == (5, reward)
    recorded = {"name": f"{__name__}:{kind.__qualname__}"} | ({"worth": 0.25} if kind is Twice else {})
    assert recorded.items() <= meaning(tmp_path)["env"].items()


def test_what_an_environment_is_given_takes_the_settings_of_the_config(tmp_path: Path) -> None:
    agents = {"a": {"env": {"name": "arithmetic", "worth": 2.0}}}
    progress = rollbook.collect(config(tmp_path, agents=agents), policy=Adder(), environment=Twice, log=quiet)
    assert progress.reward_mean == 4.0


@pytest.mark.parametrize("word", ["workers=2", "engine=ray"])
def test_objects_are_refused_where_they_cannot_go(word: str, tmp_path: Path) -> None:
    objects = f"{__name__}:Adder, {__name__}:Twice"
    said = f"{word}: other processes cannot be given .*: {objects}. Leave out"
    with pytest.raises(UsageError, match=said):
        rollbook.collect(config(tmp_path), word, policy=Adder(), environment=Twice, log=quiet)
    assert not (tmp_path / "out.jsonl").exists()


class Mute:
    async def act(self, request: Request) -> None:
        return None


class Needy(Adder):
    def __init__(self, needed: int) -> None:
        super().__init__(needed)


@pytest.mark.parametrize(
    ("passed", "said"),
    [
        ({"policy": Mute()}, r"policy=: .*:Mute has no method close; a policy has async act"),
        ({"policy": Needy}, r"policy=: .*:Needy cannot be made without arguments; pass an object: TypeError"),
        ({"environment": Twice()}, r"environment=: <.*Twice object.*> is not a class. One object is one"),
        ({"environment": str}, r"str is not an Environment; subclass"),
        ({"environment": Mute}, r"Mute is not an Environment; subclass"),
    ],
)
def test_what_is_no_policy_or_environment_is_refused(
    passed: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=said):
        rollbook.collect(config(tmp_path), **passed, log=quiet)
    assert not (tmp_path / "out.jsonl").exists()


def test_an_answer_that_is_none_is_a_failure(tmp_path: Path) -> None:
    class Silent(Mute):
        async def close(self) -> None:
            return None

    progress = rollbook.collect(config(tmp_path, limit=1), policy=Silent(), log=quiet)
    assert progress.failures == {"environment": 1}
    (failure,) = results(tmp_path / "out_failures.ndjson")
    place = r"\(.*test_passed_objects\.py:\d+\)"
    assert re.fullmatch(rf"Silent\.act {place} must return a Completion, not NoneType", failure["message"])


_CELL = """
from rollbook.policies.scripted import ScriptedPolicy

class Own(ScriptedPolicy):
    def __init__(self):
        super().__init__("It is 2.")
"""


def test_objects_of_a_notebook_have_a_name_and_no_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = type(sys)("cell")  # without a file
    exec(_CELL, cell.__dict__)
    monkeypatch.setitem(sys.modules, "cell", cell)
    rollbook.collect(config(tmp_path, limit=1), policy=cell.Own(), log=quiet)
    assert meaning(tmp_path)["policy"] == {"kind": "cell:Own", "source_sha256": None}
