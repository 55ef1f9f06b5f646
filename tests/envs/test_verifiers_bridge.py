"""Environments of the package `verifiers`, run by the package itself against a real endpoint."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from env_helpers import question, task_of
from fake_servers import Told, chat_answer, serving
from rollbook.envs.agents import build_agent, describe_agent, make_tasks
from rollbook.errors import UsageError
from rollbook.rollouts.types import Episode, FailureKind, RolloutFailure

HAVE_VERIFIERS = importlib.util.find_spec("verifiers") is not None
needs_verifiers = pytest.mark.skipif(not HAVE_VERIFIERS, reason="needs the package verifiers")

# Is the answer the double of the number?
TASKSET = """
import httpx
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str

class Config(vf.TasksetConfig):
    numbers: int = 3

class Double(vf.Task[Data]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

class Doubles(vf.Taskset[Double, Config]):
    def load(self):
        for n in range(self.config.numbers):
            yield Double(Data(prompt=f"double {n}", answer=str(2 * n)), self.config.task)

class OneCall(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, *rest, **more):
        body = {"model": ctx.model, "messages": [{"role": "user", "content": data.prompt}]}
        async with httpx.AsyncClient() as client:
            url = endpoint.rstrip("/") + "/chat/completions"
            headers = {"Authorization": f"Bearer {secret}"}
            answer = await client.post(url, json=body, headers=headers, timeout=30)
        return vf.ProgramResult(exit_code=int(answer.status_code != 200), stdout="", stderr=answer.text)

__all__ = ["Doubles", "OneCall"]
"""


@pytest.fixture
def doubles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of an environment package that is installed."""
    name = f"doubles_{abs(hash(tmp_path)) % 10**8}"
    (tmp_path / f"{name}.py").write_text(TASKSET)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the working directory is added to it
    monkeypatch.chdir(tmp_path)
    return name


def settings_of(numbers: int) -> dict[str, Any]:
    return {"taskset": {"numbers": numbers}, "agent": {"runtime": {"type": "subprocess"}}}


def double(asked: dict[str, Any]) -> dict[str, Any]:
    number = int(asked["messages"][-1]["content"].split()[-1])
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    return chat_answer(str(2 * number) if number != 1 else "eleven") | {"usage": usage, "created": 1}


async def _run(url: str, env: dict[str, Any], rows: list[dict[str, Any]]) -> list[Episode]:
    agent = build_agent(env, {"base_url": url, "model": "m", "params": {"max_output_tokens": 9}})
    try:
        return list(await asyncio.gather(*(agent.run(task_of(row)) for row in rows)))
    finally:
        await agent.close()


@needs_verifiers
def test_rows_of_its_dataset_are_played_and_graded_by_it(doubles: str) -> None:
    env = {"name": f"verifiers:{doubles}", **settings_of(4)}
    rows = list(make_tasks(env, 10))
    assert len(rows) == 4
    assert rows[2]["responses_create_params"]["input"] == [{"role": "user", "content": "double 2"}]
    server = Told(double)

    async def play() -> list[Episode]:
        async with serving(server) as url:
            return await _run(url, env, rows)

    episodes = asyncio.run(play())
    assert [episode.reward for episode in episodes] == [1.0, 0.0, 1.0, 1.0]
    assert [episode.metrics["right"] for episode in episodes] == [1.0, 0.0, 1.0, 1.0]
    assert episodes[3].messages[-1]["content"] == "6"
    assert episodes[3].prompt[-1]["content"] == "double 3"
    assert (episodes[3].usage.input_tokens, episodes[3].usage.output_tokens) == (5, 2)
    assert len(episodes[3].turns) == 1
    assert {asked["model"] for asked in server.asked} == {"m"}
    assert {asked.get("max_tokens") or asked["max_completion_tokens"] for asked in server.asked} == {9}


@needs_verifiers
@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, FailureKind.INVALID_REQUEST),
        (404, FailureKind.INVALID_REQUEST),
        (429, FailureKind.RATE_LIMIT),
        (500, FailureKind.SERVER_ERROR),
    ],
)
def test_an_endpoint_that_refuses_is_a_failure_of_that_kind_and_not_a_zero(
    status: int, kind: FailureKind, doubles: str
) -> None:
    env = {"name": f"verifiers:{doubles}", **settings_of(1)}

    async def play() -> None:
        async with serving(Told({"error": {"message": "no"}}, status=status)) as url:
            await _run(url, env, list(make_tasks(env, 1)))

    with pytest.raises(RolloutFailure) as caught:
        asyncio.run(play())
    assert (caught.value.kind, caught.value.status) == (kind, status)


@needs_verifiers
def test_an_endpoint_that_is_not_there_is_worth_another_try(doubles: str) -> None:
    env = {"name": f"verifiers:{doubles}", **settings_of(1)}
    with pytest.raises(RolloutFailure) as caught:
        asyncio.run(_run("http://127.0.0.1:1/v1", env, list(make_tasks(env, 1))))
    assert caught.value.kind in (FailureKind.CONNECT, FailureKind.SERVER_ERROR)


@needs_verifiers
def test_a_cloud_runtime_without_a_login_is_refused(
    doubles: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("PRIME_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UsageError, match="type: subprocess"):
        build_agent({"name": f"verifiers:{doubles}"}, {"base_url": "http://h/v1", "model": "m"})


@needs_verifiers
def test_a_row_from_elsewhere_says_what_it_lacks(doubles: str) -> None:
    with pytest.raises(RolloutFailure, match="verifiers_task"):
        env = {"name": f"verifiers:{doubles}", **settings_of(1)}
        asyncio.run(_run("http://127.0.0.1:1/v1", env, [question().row]))


@needs_verifiers
def test_names_and_settings_that_are_none_are_refused(doubles: str) -> None:
    policy = {"base_url": "http://h/v1", "model": "m"}
    with pytest.raises(UsageError, match="no_such_env"):
        build_agent({"name": "verifiers:no_such_env"}, policy)
    with pytest.raises(UsageError, match="cannot be loaded"):
        build_agent({"name": f"verifiers:{doubles}", "nombers": 3}, policy)


@needs_verifiers
def test_its_version_is_part_of_the_description(doubles: str) -> None:
    described = describe_agent({"name": f"verifiers:{doubles}"}, {"base_url": "http://h/v1", "model": "m"})
    assert described["env"]["versions"]["verifiers"]


@pytest.mark.skipif(HAVE_VERIFIERS, reason="the package is installed")
def test_without_the_package_the_command_that_installs_it_is_named() -> None:
    with pytest.raises(UsageError, match="pip install 'verifiers"):
        build_agent({"name": "verifiers:gsm8k"}, {"base_url": "http://h/v1", "model": "m"})
