"""What was sampled: where a server gives it, where it does not fit, and where it cannot be asked for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fake_servers import Told, chat_answer, serving
from rollbook.errors import UsageError
from rollbook.policies.openai import OpenAIPolicy, OpenAISettings
from rollbook.rollouts.types import Completion, FailureKind, Request, RolloutFailure


def ask(server: Told, **options: Any) -> Completion:
    async def run() -> Completion:
        async with serving(server) as url:
            settings = OpenAISettings(base_url=url, model="m", **{"api": "responses", **options})
            policy = OpenAIPolicy(settings)
            try:
                return await policy.act(Request(({"role": "user", "content": "2 + 2?"},)))
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


def sampled(ids: list[int] | None, logprobs: list[float] | None) -> Told:
    answer = chat_answer("so it is 4")
    content = [{"token": "4", "logprob": number} for number in logprobs] if logprobs is not None else None
    answer["choices"][0] |= {"token_ids": ids, "logprobs": {"content": content}}
    return Told(answer)


@pytest.mark.parametrize("server", [Told(chat_answer("4")), sampled(None, None), sampled([], [])])
def test_tokens_that_were_asked_for_and_did_not_come_are_a_bad_answer(server: Told) -> None:
    with pytest.raises(RolloutFailure, match=r"return_tokens is set, .* set return_tokens: false") as caught:
        ask(server, api="chat", return_tokens=True)
    assert caught.value.kind is FailureKind.BAD_ANSWER
    assert ask(server, api="chat").message["content"]  # of nobody who did not ask


@pytest.mark.parametrize("return_tokens", [True, False])
def test_other_numbers_of_tokens_and_logprobs_are_a_bad_answer(return_tokens: bool) -> None:
    with pytest.raises(RolloutFailure, match="3 token ids and 2 logprobs") as caught:
        ask(sampled([7, 8, 9], [-0.5, -0.5]), api="chat", return_tokens=return_tokens)
    assert caught.value.kind is FailureKind.BAD_ANSWER


def test_other_numbers_of_tokens_and_logprobs_on_an_item_of_a_response_are_a_bad_answer() -> None:
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "4"}]}
    with pytest.raises(RolloutFailure, match="1 token ids and 2 logprobs") as caught:
        ask(Told({"output": [said | {"generation_token_ids": [3], "generation_log_probs": [-0.5, -1.0]}]}))
    assert caught.value.kind is FailureKind.BAD_ANSWER


@pytest.mark.parametrize(("ids", "logprobs"), [([7], None), (None, [-0.5]), ([7], [-0.5])])
def test_what_a_server_sends_of_tokens_and_logprobs_is_kept(
    ids: list[int] | None, logprobs: list[float] | None
) -> None:
    completion = ask(sampled(ids, logprobs), api="chat", return_tokens=True)
    assert (completion.token_ids, completion.logprobs) == (ids, logprobs)
