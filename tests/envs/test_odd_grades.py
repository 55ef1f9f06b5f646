"""A grader that returns something else: the message names its function and file, not ours."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rollbook.envs.agents import build_agent
from rollbook.rollouts.types import FailureKind, RolloutFailure, Task

SCRIPTED = {"kind": "scripted", "script": ["4"]}
CODE = """
from rollbook.envs import Environment, single_turn

@single_turn
def forgetful(task, answer):
    grade = {grade}

@single_turn
def odd(task, answer):
    return {grade}

@single_turn
async def late(task, answer):
    return {grade}

class Mine(Environment):
    def step(self, message):
        return {grade}
"""


@pytest.mark.parametrize(
    ("name", "grade", "line", "said"),
    [
        ("forgetful", "1.0", 4, "returned None; a grader returns a number"),
        ("odd", "'good'", 8, "returned 'good'; a grader returns a number"),
        ("odd", "{'score': 1}", 8, "returned {'score': 1}, which has no 'reward'"),
        ("odd", "{'reward': None}", 8, "returned {'reward': None}; a grader"),
        ("late", "None", 12, "returned None; a grader returns a number"),
        ("Mine", "None", 17, "must return a Feedback, not NoneType"),
    ],
)
def test_the_function_and_its_file_are_named(
    name: str, grade: str, line: int, said: str, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(CODE.format(grade=grade))
    agent = build_agent({"name": f"{mine}:{name}"}, SCRIPTED)
    with pytest.raises(RolloutFailure) as caught:
        asyncio.run(agent.run(Task(id="t", messages=[{"role": "user", "content": "?"}], row={})))
    assert caught.value.kind is FailureKind.ENVIRONMENT
    assert said in str(caught.value)
    assert f"{name if name != 'Mine' else 'Mine.step'} ({mine}:{line}" in str(caught.value)
    assert "envs/base.py" not in str(caught.value)
