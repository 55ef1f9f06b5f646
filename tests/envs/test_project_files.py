"""The file of an environment and those of the same project that it imports: found, and in its digest."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from collecting import config, row, run, write_rows
from env_helpers import question
from rollbook.envs.agents import build_agent
from rollbook.envs.registry import describe_code
from rollbook.errors import UsageError
from rollbook.policies.registry import describe_policy
from rollbook.rollouts import user_code
from rollbook.rollouts.project_files import project_files

ENV = """
from rollbook.envs import single_turn
{imports}

@single_turn
def graded(task, answer):
    {body}
"""


@pytest.fixture(autouse=True)
def _path_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    modules = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(user_code, "_helper_texts", {})
    yield
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def environment(directory: Path, imports: str, body: str = "return helper.REWARD") -> str:
    directory.mkdir(exist_ok=True)
    (directory / "env.py").write_text(ENV.format(imports=imports, body=body))
    return f"{directory / 'env.py'}:graded"


def reward(name: str) -> float | None:
    async def play() -> float | None:
        agent = build_agent({"name": name}, {"kind": "scripted", "script": ["2"]})
        try:
            return (await agent.run(question())).reward
        finally:
            await agent.close()

    return asyncio.run(play())


def write(path: Path, text: str) -> None:
    """At another second each time, which is how Python knows that a file was edited."""
    path.parent.mkdir(parents=True, exist_ok=True)
    second = int(path.stat().st_mtime) + 2 if path.exists() else 1_700_000_000
    path.write_text(text)
    os.utime(path, (second, second))


@pytest.mark.parametrize(
    ("imports", "body", "helper"),
    [
        ("import helper", "return helper.REWARD", "helper.py"),
        ("from helper import REWARD", "return REWARD", "helper.py"),
        ("", "from helper import REWARD\n    return REWARD", "helper.py"),
        ("import kit.helper", "return kit.helper.REWARD", "kit/helper.py"),
        ("from kit import helper", "return helper.REWARD", "kit/helper.py"),
        ("from kit.helper import *", "return REWARD", "kit/helper.py"),
    ],
)
@pytest.mark.parametrize("is_package", [True, False])
def test_a_helper_beside_it(imports: str, body: str, helper: str, is_package: bool, tmp_path: Path) -> None:
    name = environment(tmp_path / "mine", imports, body)
    file = tmp_path / "mine" / helper
    if is_package and "/" in helper:
        write(file.parent / "__init__.py", "")
    write(file, "REWARD = 0.25\n")
    assert reward(name) == 0.25
    before = describe_code(name)
    assert describe_code(name) == before
    write(file, "REWARD = 0.75\n")
    assert describe_code(name) != before
    assert reward(name) == 0.75


def test_a_helper_of_a_helper(tmp_path: Path) -> None:
    name = environment(tmp_path / "mine", "import helper")
    write(tmp_path / "mine" / "helper.py", "from kit import REWARD\n")
    write(tmp_path / "mine" / "kit" / "__init__.py", "from .deep import REWARD\n")
    write(tmp_path / "mine" / "kit" / "deep.py", "REWARD = 0.25\n")
    assert reward(name) == 0.25
    before = describe_code(name)
    write(tmp_path / "mine" / "kit" / "deep.py", "REWARD = 0.75\n")
    assert describe_code(name) != before
    assert reward(name) == 0.75


def test_files_beside_it_that_it_does_not_import_do_not_count(tmp_path: Path) -> None:
    name = environment(tmp_path / "mine", "import helper, json, numpy")
    write(tmp_path / "mine" / "helper.py", "REWARD = 0.25\n")
    write(tmp_path / "mine" / "other.py", "x = 1\n")
    write(tmp_path / "mine" / "json.py", "raise SystemExit('in place of an installed one')\n")
    write(tmp_path / "mine" / "numpy.py", "raise SystemExit('in place of an installed one')\n")
    before = describe_code(name)
    write(tmp_path / "mine" / "other.py", "x = 2\n")
    assert describe_code(name) == before
    assert reward(name) == 0.25
    path = tmp_path / "mine" / "env.py"
    assert set(project_files(path, path.read_bytes())) == {"helper"}


def test_two_helpers_of_one_name_are_not_mistaken_for_each_other(tmp_path: Path) -> None:
    first, second = (environment(tmp_path / name, "import helper") for name in ("first", "second"))
    for place, value in (("first", 0.25), ("second", 0.75)):
        write(tmp_path / place / "helper.py", f"REWARD = {value}\n")
    assert reward(first) == 0.25
    with pytest.raises(UsageError) as caught:
        reward(second)
    assert f"it imports {tmp_path / 'second' / 'helper.py'}, and another file of that name is in use" in str(
        caught.value
    )


def test_a_policy_of_the_users_too(tmp_path: Path) -> None:
    write(tmp_path / "helper.py", "SAYS = '2'\n")
    (tmp_path / "script.py").write_text("import helper\n\ndef act(request):\n    return helper.SAYS\n")
    policy = {"kind": "scripted", "script": f"{tmp_path / 'script.py'}:act"}
    before = describe_policy(policy)
    write(tmp_path / "helper.py", "SAYS = '3'\n")
    assert describe_policy(policy) != before


def test_a_collection_is_not_resumed_with_another_helper(tmp_path: Path) -> None:
    name = environment(tmp_path / "mine", "import helper")
    write(tmp_path / "mine" / "helper.py", "REWARD = 0.25\n")
    write_rows(tmp_path / "in.jsonl", (row(f"t{number}") for number in range(4)))
    config(tmp_path, agents={"a": {"env": {"name": name}, "policy": {"kind": "scripted", "script": ["2"]}}})
    run(tmp_path, "limit=2")
    run(tmp_path, "limit=3")
    write(tmp_path / "mine" / "helper.py", "REWARD = 0.75\n")
    with pytest.raises(UsageError, match="source_sha256"):
        run(tmp_path, "limit=4")
