"""Agents from a config: names, settings, what is refused, and what a manifest says of them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from env_helpers import question, run_one
from rollbook.envs.agents import build_agent, describe_agent, make_tasks
from rollbook.errors import UsageError

SCRIPTED = {"kind": "scripted", "script": ["42"]}
OPENAI = {"kind": "openai", "base_url": "http://127.0.0.1:1/v1", "model": "m"}

MINE = """
from rollbook.envs import Environment, Feedback, single_turn

class Mine(Environment):
    def __init__(self, bonus: float = 0.0):
        self.bonus = bonus

    def step(self, message):
        return Feedback(reward=1.0 + self.bonus)

@single_turn
def graded(task, answer, wanted="42"):
    return answer == wanted

not_one = 5

def policy(request):
    return "from a file"
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of the user's in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / f"mine_{abs(hash(tmp_path)) % 10**8}.py"
    path.write_text(MINE)
    return path


def reward(env: dict[str, Any], policy: dict[str, Any] = SCRIPTED) -> float:
    return run_one(build_agent(env, policy), question("42")).reward


def test_ones_own_by_path_and_by_module(mine: Path) -> None:
    assert reward({"name": f"{mine}:Mine", "bonus": 0.5}) == 1.5
    assert reward({"name": f"{mine.name}:Mine"}) == 1.0
    assert reward({"name": f"{mine.stem}:Mine"}) == 1.0
    assert reward({"name": f"{mine.stem}:graded"}) == 1.0
    assert reward({"name": f"{mine}:graded", "wanted": "43"}) == 0.0


def test_two_files_of_one_name_do_not_take_each_others_place(tmp_path: Path) -> None:
    for folder, value in (("a", 1.0), ("b", 2.0)):
        (tmp_path / folder).mkdir()
        text = MINE.replace("1.0 + self.bonus", f"{value}")
        (tmp_path / folder / "env.py").write_text(text)
    assert reward({"name": f"{tmp_path}/a/env.py:Mine"}) == 1.0
    assert reward({"name": f"{tmp_path}/b/env.py:Mine"}) == 2.0


def test_names_that_are_none_are_refused_with_a_way_out(mine: Path) -> None:
    (mine.parent / "torn.py").write_text("def f(:\n")
    for name, said in (
        ("arithmetik", "did you mean 'arithmetic'"),
        ("nonsense", "built in: arithmetic"),
        ("no_such_module:Env", "no module 'no_such_module'"),
        ("missing.py:Env", "no file missing.py"),
        (f"{mine}:Nine", "it has: .*Mine, graded"),
        (f"{mine}:not_one", "not an Environment"),
        ("torn.py:Env", r"torn.py:1"),
        ("", "env.name is missing"),
        (None, "env.name is missing"),
    ):
        with pytest.raises(UsageError, match=said):
            build_agent({"name": name}, SCRIPTED)


def test_settings_nobody_takes_are_refused_before_the_first_row(mine: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'bonus'"):
        build_agent({"name": f"{mine}:Mine", "bonos": 1}, SCRIPTED)
    with pytest.raises(UsageError, match="did you mean 'wanted'"):
        build_agent({"name": f"{mine}:graded", "want": 1}, SCRIPTED)


@pytest.mark.parametrize("parameters", ["(answer)", "()", "(*, task, answer)"])
def test_a_grading_function_of_other_parameters_is_told_which_it_takes(parameters: str, mine: Path) -> None:
    mine.write_text(MINE.replace('(task, answer, wanted="42")', parameters))
    said = re.escape(f"takes (task, answer), and this one {parameters}; the row is task.row")
    with pytest.raises(UsageError, match=said):
        build_agent({"name": f"{mine}:graded"}, SCRIPTED)


def test_scripts_by_path_module_and_list(mine: Path) -> None:
    env = {"name": f"{mine}:graded", "wanted": "from a file"}
    assert reward(env, {"kind": "scripted", "script": f"{mine}:policy"}) == 1.0
    assert reward(env, {"kind": "scripted", "script": f"{mine.stem}:policy"}) == 1.0
    assert reward(env, {"kind": "scripted", "script": [{"content": "from a file"}]}) == 1.0
    for script, said in (
        ("just text", "replies as a list"),
        (f"{mine}:nobody", "has no function nobody"),
        ("nowhere.py:f", "no file"),
        ([], "at least one reply"),
    ):
        with pytest.raises(UsageError, match=said):
            build_agent(env, {"kind": "scripted", "script": script})


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (None, "needs a policy"),
        ({**OPENAI, "kind": "opnai"}, "did you mean 'openai'"),
        ({**OPENAI, "modle": "m"}, "did you mean 'model'"),
        ({**OPENAI, "api": "completions"}, r"policy\.api"),
        ({"kind": "openai", "model": "m"}, "base_url"),
        ({**OPENAI, "api_key": "sk-1"}, r"policy\.api_key_env"),
        ({**OPENAI, "headers": {"authorization": "Bearer x"}}, r"policy\.api_key_env"),
        ({**SCRIPTED, "dely": 1}, "did you mean 'delay'"),
    ],
)
def test_policies_that_are_refused(policy: dict[str, Any] | None, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        build_agent({"name": "arithmetic"}, policy)


def test_a_judges_key_does_not_belong_in_a_file_either() -> None:
    judge = {"base_url": "http://h/v1", "model": "m", "api_key": "sk-1"}
    with pytest.raises(UsageError, match=r"env\.judge\.api_key_env"):
        build_agent({"name": "dataset", "grader": "judge", "judge": judge}, SCRIPTED)


def test_bridges_bring_their_own_loop() -> None:
    with pytest.raises(UsageError, match="leave out policy"):
        build_agent({"name": "gym", "url": "http://h"}, SCRIPTED)
    with pytest.raises(UsageError, match=r"env\.url"):
        build_agent({"name": "gym", "url": "h"})
    with pytest.raises(UsageError, match="did you mean 'url'"):
        build_agent({"name": "gym", "ulr": "http://h"})
    with pytest.raises(UsageError, match="kind openai"):
        build_agent({"name": "verifiers:gsm8k"}, SCRIPTED)


def test_a_limit_of_calls_is_for_environments_that_are_played_here() -> None:
    build_agent({"name": "arithmetic"}, SCRIPTED, call_timeout_s=1.0)
    with pytest.raises(UsageError, match=r"env 'gym' plays its episodes itself.*leave it out"):
        build_agent({"name": "gym", "url": "http://127.0.0.1:1"}, call_timeout_s=1.0)


def test_tasks_where_there_are_none() -> None:
    for env in ({"name": "dataset"}, {"name": "gym", "url": "http://h"}):
        with pytest.raises(UsageError, match="input_jsonl_fpath"):
            make_tasks(env, 3)


BREAKING = """
from rollbook.envs import Environment

class Shared(Environment):
    @classmethod
    def shared(cls, **settings):
        return {"table": open("missing.csv")}

class AtOnce(Environment):
    @classmethod
    def tasks(cls, count, seed=0):
        raise SystemExit("no rows")

class Later(Environment):
    @classmethod
    def tasks(cls, count, seed=0):
        yield {"id": "one"}
        raise KeyError("no more")
"""


def test_what_an_environment_raises_before_the_start_names_it_and_the_line(tmp_path: Path) -> None:
    path = tmp_path / "breaking.py"
    path.write_text(BREAKING)
    with pytest.raises(UsageError, match=r"breaking\.py:Shared.*FileNotFoundError.*breaking\.py:7"):
        build_agent({"name": f"{path}:Shared"}, SCRIPTED)
    with pytest.raises(UsageError, match=r"breaking\.py:AtOnce.*SystemExit: no rows.*breaking\.py:12"):
        make_tasks({"name": f"{path}:AtOnce"}, 3)
    rows = make_tasks({"name": f"{path}:Later"}, 3)
    assert next(rows) == {"id": "one"}
    with pytest.raises(UsageError, match=r"breaking\.py:Later.*KeyError: 'no more'.*breaking\.py:18"):
        next(rows)


def test_a_description_holds_what_changes_a_result_and_nothing_else() -> None:
    judge = {"base_url": "http://a/v1", "model": "j", "total_timeout_s": 3, "prompt": "{answer}?"}
    env = {"name": "dataset", "grader": "judge", "judge": judge}
    here = describe_agent(env, {**OPENAI, "params": {"temperature": 0.5}})
    moved = {**OPENAI, "base_url": "http://b/v1", "connect_timeout_s": 1, "params": {"temperature": 0.5}}
    away = {**env, "judge": {**judge, "base_url": "http://b/v1", "total_timeout_s": 9, "api_key_env": "K"}}
    assert describe_agent(away, moved) == here
    assert "http" not in str(here)
    assert here["policy"]["model"] == "m"
    for changed in (
        describe_agent(env, {**OPENAI, "params": {"temperature": 0.6}}),
        describe_agent(env, {**OPENAI, "model": "n", "params": {"temperature": 0.5}}),
        describe_agent(
            {**env, "judge": {**judge, "prompt": "{answer}!"}}, {**OPENAI, "params": {"temperature": 0.5}}
        ),
        describe_agent({**env, "answer_key": "a"}, {**OPENAI, "params": {"temperature": 0.5}}),
        describe_agent(env, {**OPENAI, "params": {"temperature": 0.5}}, max_turns=3),
    ):
        assert changed != here


def test_a_description_notices_changed_code(tmp_path: Path) -> None:
    described = []
    for number, reward_text in enumerate(("1.0", "2.0", "1.0")):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "env.py").write_text(MINE.replace("1.0 + self.bonus", reward_text))
        name, script = f"{folder}/env.py:Mine", f"{folder}/env.py:policy"
        said = describe_agent({"name": name}, {"kind": "scripted", "script": script})
        described.append((said["env"]["source_sha256"], said["policy"]["source_sha256"]))
    assert described[0] == described[2] != described[1]


def test_a_description_notices_what_a_file_made_of_code_from_elsewhere(tmp_path: Path) -> None:
    text = """
from functools import partial
from rollbook.envs.arithmetic import Arithmetic as Mine
bonus = {number}
def reply(text, request): return text
policy = partial(reply, "{number}")
"""
    described = []
    for folder, number in (("a", 1), ("b", 2), ("c", 1)):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / "env.py"
        path.write_text(text.format(number=number))
        said = describe_agent({"name": f"{path}:Mine"}, {"kind": "scripted", "script": f"{path}:policy"})
        described.append((said["env"]["source_sha256"], said["policy"]["source_sha256"]))
    first, second, third = described
    assert first == third
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_a_description_of_a_server_says_what_is_known() -> None:
    assert describe_agent({"name": "gym", "url": "http://h"}) == {"env": {"name": "gym"}}
