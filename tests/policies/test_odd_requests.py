"""Rows whose parameters make no request: refused without asking the server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fake_servers import Told, chat_answer, serving
from rollbook.envs.agents import build_policy
from rollbook.policies.base import FailureKind, Request, RolloutFailure


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
                await policy.act(Request([{"role": "user", "content": "2 + 2?"}], **asked))
            finally:
                await policy.close()

    with pytest.raises(RolloutFailure, match="the row's parameters make no request") as caught:
        asyncio.run(act())
    assert (caught.value.kind, server.asked) == (FailureKind.INVALID_REQUEST, [])
