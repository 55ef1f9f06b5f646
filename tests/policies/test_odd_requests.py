"""Rows and settings that make no request: refused without asking the server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fake_servers import Told, chat_answer, serving
from rollbook.envs.gym_bridge import GymAgent
from rollbook.envs.verifiers_bridge import VerifiersAgent
from rollbook.errors import UsageError
from rollbook.policies.openai import OpenAIPolicy, OpenAISettings
from rollbook.policies.registry import build_policy
from rollbook.rollouts.types import FailureKind, Request, RolloutFailure


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize(
    "asked", [{"tools": ["calculator"]}, {"params": {"metadata": {"extra_body": "{top_k: 5}"}}}]
)
def test_parameters_of_another_shape_are_an_invalid_request(asked: dict[str, Any], api: str) -> None:
    server = Told(chat_answer("4"))

    async def act() -> None:
        async with serving(server) as url:
            policy = build_policy({"kind": "openai", "base_url": url, "model": "m", "api": api})
            try:
                await policy.act(Request(({"role": "user", "content": "2 + 2?"},), **asked))
            finally:
                await policy.close()

    with pytest.raises(RolloutFailure, match="the row's parameters make no request") as caught:
        asyncio.run(act())
    assert (caught.value.kind, server.asked) == (FailureKind.INVALID_REQUEST, [])


@pytest.mark.parametrize("key", ["s3cret\r", "s3cret\n", " s3cret", "s3\x00cret", "s3cret\udce9"])
def test_a_key_that_no_header_can_hold_is_refused_by_its_variable(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.environ", {"SOME_KEY": key})
    refused = r"policy\.api_key_env names SOME_KEY, .* type: export SOME_KEY="
    with pytest.raises(UsageError, match=refused) as said:
        OpenAIPolicy(OpenAISettings(base_url="http://h/v1", model="m", api_key_env="SOME_KEY"))
    assert "cret" not in str(said.value)


@pytest.mark.parametrize("name", ["total_timeout_s", "connect_timeout_s"])
@pytest.mark.parametrize("seconds", [-1.0, 0.0, float("nan"), float("inf")])
def test_a_time_limit_that_is_none_is_refused_by_its_key(name: str, seconds: float) -> None:
    limit: dict[str, Any] = {name: seconds}
    with pytest.raises(UsageError, match=rf"^agents\.a\.policy\.{name} is "):
        OpenAIPolicy(OpenAISettings(base_url="http://h/v1", model="m", **limit), where="agents.a.policy")
    with pytest.raises(UsageError, match=rf"^env\.{name} is "):
        GymAgent("http://h", **limit)
    with pytest.raises(UsageError, match=rf"^policy\.{name} is "):
        VerifiersAgent("none", {}, OpenAISettings(base_url="http://h/v1", model="m", **limit))
