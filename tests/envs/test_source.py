"""An environment of a job: opened from settings or a class, its tasks from a file or of its own making."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rollbook.envs import Environment, Feedback, single_turn
from rollbook.envs.registry import ENVIRONMENTS
from rollbook.envs.source import EnvironmentSource, open_environment
from rollbook.errors import UsageError
from rollbook.policies.scripted import ScriptedPolicy
from rollbook.rollouts.episode import play
from rollbook.rollouts.types import Episode, Message, RolloutFailure, Task


class Table:
    closed = 0

    def close(self) -> None:
        type(self).closed += 1


class Echo(Environment):
    def __init__(self, table: Table | None = None, bonus: float = 0.0) -> None:
        self.table, self.bonus = table, bonus

    @classmethod
    def shared(cls, **settings: Any) -> dict[str, Any]:
        return {"table": Table()}

    def step(self, message: Message) -> Feedback:
        return Feedback(reward=1.0 + self.bonus)


@single_turn
def exact(task: Task, answer: str, wanted: str = "4") -> bool:
    return answer == wanted


def _write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def _played(source: EnvironmentSource, answer: str, row: dict[str, Any]) -> Episode:
    async def once() -> Episode:
        try:
            return await play(source.make(), ScriptedPolicy(answer), source.task(row))
        finally:
            await source.close()

    return asyncio.run(once())


def test_the_rows_of_a_file_in_any_of_the_usual_shapes(tmp_path: Path) -> None:
    shapes: list[dict[str, Any]] = [
        {"prompt": "2 + 2?"},
        {"question": "2 + 2?"},
        {"messages": [{"role": "user", "content": "2 + 2?"}]},
        {"responses_create_params": {"input": "2 + 2?", "temperature": 0.5}},
    ]
    path = _write(tmp_path / "t.jsonl", *({**row, "expected_answer": "4"} for row in shapes))
    env = {"name": "dataset", "as": "sums", "weight": 2, "tasks": str(path), "grader": "number"}
    source = open_environment({**env, "system": "Be brief."})
    assert (source.name, source.weight) == ("sums", 2.0)
    assert source.rows is not None and len(source.rows) == 4
    for row in source.rows:
        task = source.task(row, repeat=1, seed=5, params={"top_p": 1})
        assert [message["content"] for message in task.messages] == ["Be brief.", "2 + 2?"]
        assert (task.repeat, task.seed, task.params["top_p"]) == (1, 5, 1)
        assert _played(source, "it is 4", row).reward == 1.0
        assert _played(source, "it is 5", row).reward == 0.0
    assert source.task(source.rows[3]).params == {"temperature": 0.5}
    assert len({source.task(row).id for row in source.rows}) == 1  # of what is shown, in whatever shape
    assert open_environment(source) is source


@pytest.mark.parametrize("grade", [None, "good", [1.0]])
def test_a_grader_that_returns_no_grade_says_so(grade: Any) -> None:
    made = single_turn(lambda task, answer: grade)
    with pytest.raises(RolloutFailure, match=r"test_source\.py:\d+\) returned .*; a grader returns a number"):
        made().step({"role": "assistant", "content": "x"})


def test_a_row_with_a_system_message_keeps_it() -> None:
    source = open_environment({"name": exact, "system": "ours"})
    row = {"messages": [{"role": "system", "content": "its own"}, {"role": "user", "content": "?"}]}
    assert [message["content"] for message in source.task(row).messages] == ["its own", "?"]


def test_rows_by_a_seed_are_the_same_again_and_every_row_comes_before_one_comes_twice(tmp_path: Path) -> None:
    path = _write(tmp_path / "t.jsonl", *({"id": n, "prompt": "?", "expected_answer": "4"} for n in range(5)))
    source = open_environment({"name": "dataset", "tasks": str(path)})
    first = [row["id"] for row in source.tasks(13, seed=1)]
    assert first == [row["id"] for row in source.tasks(13, seed=1)]
    assert first != [row["id"] for row in source.tasks(13, seed=2)]
    assert sorted(first[:5]) == sorted(first[5:10]) == list(range(5))
    assert first[:5] != first[5:10]


def test_rows_of_a_file_without_a_last_newline_and_with_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"id": 2, "prompt": "b", "n": 123456789012345678901}')
    rows = open_environment({"name": exact, "tasks": str(path)}).rows
    assert rows is not None
    assert [row["prompt"] for row in rows] == ["a", "b"]
    assert rows[-1]["n"] == 123456789012345678901
    assert rows[0:2] == [*rows]


def test_bad_rows_are_refused_together_with_their_lines(tmp_path: Path) -> None:
    path = _write(tmp_path / "t.jsonl", {"prompt": "a"}, "{", {"no": "prompt"}, {"prompt": 5}, [1])
    with pytest.raises(UsageError) as raised:
        open_environment({"name": exact, "tasks": str(path)})
    for number in (2, 3, 4, 5):
        assert f"t.jsonl:{number}: " in str(raised.value)
    assert "t.jsonl:1:" not in str(raised.value)
    assert "it has: no" in str(raised.value)
    for name, text in (("empty.jsonl", "\n"), ("many.jsonl", "{\n" * 30)):
        (tmp_path / name).write_text(text)
        with pytest.raises(UsageError, match=r"it has no rows|and 10 more"):
            open_environment({"name": exact, "tasks": str(tmp_path / name)})
    with pytest.raises(UsageError, match="there is no file"):
        open_environment({"name": exact, "tasks": str(tmp_path / "none.jsonl")})


def test_tasks_of_its_own_making() -> None:
    source = open_environment(
        {"name": "arithmetic", "digits": 1, "operations": ["+"], "prompt": "{problem}="}
    )
    assert source.rows is None
    rows = list(source.tasks(30, seed=3))
    assert rows == list(source.tasks(30, seed=3))
    for row in rows:
        (message,) = source.task(row).messages
        one, other = message["content"].removesuffix("=").split(" + ")
        assert 0 <= int(one) <= 9 and int(one) + int(other) == int(row["expected_answer"])
    with pytest.raises(UsageError, match="makes no tasks of its own"):
        open_environment({"name": "dataset"}).tasks(3)


def test_a_calculator_for_a_tiny_model() -> None:
    env = {"name": "calculator", "operations": 1, "digits": 1, "prompt": "{problem}"}
    source = open_environment(env)
    for row in source.tasks(20):
        (message,) = source.task(row).messages
        one, operation, other = message["content"].split()
        assert len(one) == len(other) == 1 and operation in "+-*"
    for wrong in ({"digits": 0}, {"digits": 7}, {"prompt": "no place for it"}):
        with pytest.raises(UsageError, match=r"env\.(digits|prompt)"):
            open_environment({**env, **wrong})


def test_a_class_is_taken_where_a_name_is_and_what_is_shared_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Table, "closed", 0)
    monkeypatch.setitem(ENVIRONMENTS, "echo", Echo)
    for env, reward in ((Echo, 1.0), ({"name": Echo, "bonus": 0.5}, 1.5), ({"name": "echo"}, 1.0)):
        source = open_environment(env)  # type: ignore[arg-type]
        assert source.make().table is source.make().table is not None  # type: ignore[attr-defined]
        assert _played(source, "x", {"prompt": "?"}).reward == reward
    assert Table.closed == 3
    assert open_environment(Echo).name == "Echo"


def test_a_description_has_what_decides_the_reward() -> None:
    assert open_environment({"name": "arithmetic", "as": "a", "weight": 3}).describe() == {
        "name": "arithmetic",
        "version": 1,
    }
    described = open_environment({"name": exact, "wanted": "5", "system": "s"}).describe()
    assert described.keys() == {"name", "wanted", "system", "source_sha256"}
    assert len(described["source_sha256"]) == 64


def test_an_environment_with_a_setting_called_system_gets_it() -> None:
    class Own(Echo):
        def __init__(self, system: str = "", table: Table | None = None) -> None:
            self.system = system

    source = open_environment({"name": Own, "system": "mine"})
    assert source.make().system == "mine"  # type: ignore[attr-defined]
    assert source.task({"prompt": "?"}).messages == [{"role": "user", "content": "?"}]


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"name": "gym", "url": "http://h"}, "plays its episodes itself"),
        ({"name": "verifiers:gsm8k"}, "plays its episodes itself"),
        ({"name": "arithmetik"}, "did you mean 'arithmetic'"),
        ({}, "env.name is missing"),
        ({"name": int}, "is not an Environment"),
        ({"name": exact, "wnated": 1}, r"unknown key 'env\.wnated'; did you mean 'wanted'\?"),
        ({"name": exact, "wieght": 1}, r"unknown key 'env\.wieght'; did you mean 'weight'\?"),
        ({"name": exact, "bonus": 1}, r"unknown key 'env\.bonus'; exact takes: wanted"),
        ({"name": exact, "system": 5}, "env.system"),
        ({"name": exact, "judge": {"api_key": "sk-1"}}, "api_key"),
    ],
)
def test_settings_that_are_refused(env: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_environment(env)
