"""What was sampled, where a server by responses gives it, and where it cannot be asked for."""

from __future__ import annotations

import asyncio

import pytest

from fake_servers import Told, serving
from rollbook.errors import UsageError
from rollbook.policies.base import Completion, Request
from rollbook.policies.openai import OpenAIPolicy, OpenAISettings


def ask(server: Told) -> Completion:
    async def run() -> Completion:
        async with serving(server) as url:
            policy = OpenAIPolicy(OpenAISettings(base_url=url, model="m", api="responses"))
            try:
                return await policy.act(Request([{"role": "user", "content": "2 + 2?"}]))
            finally:
                await policy.close()

    return asyncio.run(run())


def test_the_tokens_on_the_last_item_of_a_response_are_kept() -> None:
    said = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Let me see."}],
    }
    call = {"type": "function_call", "call_id": "c", "name": "calc", "arguments": "{}"}
    sampled = {"prompt_token_ids": [1, 2], "generation_token_ids": [3], "generation_log_probs": [-0.5]}
    completion = ask(Told({"output": [said, call | sampled]}))
    assert (completion.prompt_token_ids, completion.token_ids) == ([1, 2], [3])
    assert completion.logprobs == [-0.5]


def test_a_response_without_tokens_has_none() -> None:
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "4"}]}
    completion = ask(Told({"output": [said]}))
    assert (completion.prompt_token_ids, completion.token_ids, completion.logprobs) == (None, None, None)


def test_tokens_asked_for_by_responses_are_refused() -> None:
    settings = OpenAISettings(
        base_url="http://127.0.0.1:1/v1", model="m", api="responses", return_tokens=True
    )
    with pytest.raises(
        UsageError, match=r"agents\.a\.policy\.return_tokens needs agents\.a\.policy\.api=chat"
    ):
        OpenAIPolicy(settings, where="agents.a.policy")
