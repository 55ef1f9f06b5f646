"""A server that answers with a redirect: no prompt and no key leaves the origin, nothing becomes a GET."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from fake_servers import Handler, Told, chat_answer, serving
from rollbook.envs.gym_bridge import GymAgent
from rollbook.policies.openai import OpenAIPolicy, OpenAISettings
from rollbook.rollouts.types import Completion, FailureKind, Request, RolloutFailure, Task

QUESTION = [{"role": "user", "content": "2 + 2?"}]


def redirect(status: int, to: str) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, headers={"Location": to})

    return handle


def under(prefix: str, handle: Handler, otherwise: Handler) -> Handler:
    async def chosen(request: web.Request) -> web.StreamResponse:
        return await (handle if request.path.startswith(prefix) else otherwise)(request)

    return chosen


async def ask(base_url: str, **options: Any) -> Completion:
    policy = OpenAIPolicy(OpenAISettings(base_url=base_url, model="m", **options))
    try:
        return await policy.act(Request(QUESTION))
    finally:
        await policy.close()


def asked(handler: Handler) -> Completion:
    async def run() -> Completion:
        async with serving(handler) as url:
            return await ask(url)

    return asyncio.run(run())


def failure(handler: Handler) -> RolloutFailure:
    with pytest.raises(RolloutFailure) as caught:
        asked(handler)
    return caught.value


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_reaches_another_origin(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "s3cret")
    stranger = Told(chat_answer("4"))

    async def run() -> None:
        async with serving(stranger) as elsewhere, serving(redirect(status, f"{elsewhere}/x?t=1")) as url:
            with pytest.raises(RolloutFailure, match=f"{elsewhere}/x, which is another origin") as caught:
                await ask(url, api_key_env="SOME_KEY", headers={"X-Team": "red"})
            assert caught.value.kind is FailureKind.INVALID_REQUEST
            assert "t=1" not in str(caught.value)

    asyncio.run(run())
    assert stranger.asked == []


@pytest.mark.parametrize("status", [300, 301, 302, 303])
def test_a_redirect_that_drops_the_body_is_a_failure_that_says_so(status: int) -> None:
    told = failure(under("/v1", redirect(status, "/v2/chat/completions"), Told(chat_answer("4"))))
    assert told.kind is FailureKind.INVALID_REQUEST
    assert "/v2/chat/completions, where the request would arrive without its body" in str(told)


@pytest.mark.parametrize("status", [307, 308])
def test_a_redirect_within_the_origin_that_keeps_the_body_is_followed(status: int) -> None:
    told = Told(chat_answer("4"))
    completion = asked(under("/v1", redirect(status, "/v2/chat/completions"), told))
    assert completion.message["content"] == "4"
    assert told.paths == ["/v2/chat/completions"]
    assert told.asked[0]["messages"] == QUESTION


def test_a_circle_of_redirects_ends() -> None:
    told = failure(redirect(307, "/v1/chat/completions"))
    assert told.kind is FailureKind.INVALID_REQUEST
    assert "redirected more than 5 times" in str(told)


@pytest.mark.parametrize("location", ["//", "http://[", "https://127.0.0.1:1/", "file:///etc/passwd"])
def test_an_odd_location_is_a_failure(location: str) -> None:
    assert failure(redirect(308, location)).kind is FailureKind.INVALID_REQUEST


def test_an_agent_server_cannot_send_the_row_elsewhere() -> None:
    stranger = Told({"response": {"output": []}, "reward": 1.0})

    async def run() -> None:
        async with serving(stranger) as elsewhere, serving(redirect(307, elsewhere)) as url:
            agent = GymAgent(url)
            with pytest.raises(RolloutFailure, match="another origin"):
                await agent.run(Task(id="t", messages=QUESTION, row={"secret": 1}))
            await agent.close()

    asyncio.run(run())
    assert stranger.asked == []
