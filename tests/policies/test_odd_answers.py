"""Answers of servers that are odd: what of them is a reply, and what would be a made-up zero."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fake_servers import Told, serving
from rollbook.policies.openai import OpenAIPolicy, OpenAISettings
from rollbook.records.turns import Usage
from rollbook.rollouts.types import Completion, FailureKind, Request, RolloutFailure


def ask(answer: Any, api: Any = "chat") -> Completion:
    async def run() -> Completion:
        async with serving(Told(answer)) as url:
            policy = OpenAIPolicy(OpenAISettings(base_url=url, model="m", api=api))
            try:
                return await policy.act(Request(({"role": "user", "content": "2 + 2?"},)))
            finally:
                await policy.close()

    return asyncio.run(run())


def kind_of(answer: Any, api: str = "chat") -> FailureKind:
    with pytest.raises(RolloutFailure) as caught:
        ask(answer, api)
    return caught.value.kind


def chat(message: dict[str, Any], reason: str | None = "stop", **more: Any) -> dict[str, Any]:
    usage = more.pop("usage", None)
    return {"choices": [{"message": message, "finish_reason": reason, **more}], "usage": usage}


def test_a_generation_that_the_engine_aborted_is_a_failure_of_the_server() -> None:
    assert kind_of(chat({"content": "half of"}, "abort")) is FailureKind.SERVER_ERROR
    aborted = {"status": "incomplete", "incomplete_details": {"reason": "abort"}, "output": []}
    assert kind_of(aborted, "responses") is FailureKind.SERVER_ERROR


@pytest.mark.parametrize(
    "answer",
    [
        chat({}),
        chat({}, None),
        chat({"content": None}),
        chat({"content": "", "tool_calls": []}, token_ids=[]),
        chat({"content": ""}, usage={"prompt_tokens": 5, "completion_tokens": 0}),
        chat({"content": None}, "tool_calls"),
        chat({"content": ""}, "end_turn"),
    ],
)
def test_an_answer_without_any_generation_is_a_bad_one(answer: dict[str, Any]) -> None:
    assert kind_of(answer) is FailureKind.BAD_ANSWER


def test_a_response_without_any_generation_is_a_bad_one() -> None:
    assert kind_of({"output": [], "status": "completed"}, "responses") is FailureKind.BAD_ANSWER
    empty = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": ""}]}
    assert kind_of({"output": [empty]}, "responses") is FailureKind.BAD_ANSWER


BLOCKED = {"status": "incomplete", "incomplete_details": {"reason": "content_filter"}, "output": []}


@pytest.mark.parametrize(
    ("answer", "api"),
    [
        (chat({"content": None}, "content_filter"), "chat"),
        (chat({"content": ""}, "content_filter", token_ids=[2]), "chat"),
        (chat({"content": None}, "content_filter", usage={"completion_tokens": 9}), "chat"),
        (BLOCKED, "responses"),
        (BLOCKED | {"usage": {"output_tokens": 9}}, "responses"),
    ],
)
def test_an_answer_that_a_filter_blocked_is_a_failure_that_says_so(answer: Any, api: str) -> None:
    with pytest.raises(RolloutFailure, match="the server's filter blocked the answer") as caught:
        ask(answer, api)
    assert caught.value.kind is FailureKind.BAD_ANSWER


def test_an_answer_that_a_filter_cut_short_is_a_result() -> None:
    completion = ask(chat({"content": "half of"}, "content_filter"))
    assert (completion.message["content"], completion.finish_reason) == ("half of", "content_filter")


@pytest.mark.parametrize(
    "answer",
    [
        chat({"content": ""}, usage={"completion_tokens": 1}),  # it ended at once, and says so
        chat({"content": None}, usage={"completion_tokens": 1.0}),
        chat({"content": ""}, token_ids=[2]),
        chat({"content": ""}, logprobs={"content": [{"logprob": -0.1}]}),
        chat({"content": ""}, "length"),
        chat({"content": None}, "tool_calls", token_ids=[2]),
    ],
)
def test_a_model_that_said_nothing_is_a_result(answer: dict[str, Any]) -> None:
    assert ask(answer).message["content"] == ""


def test_a_response_in_which_the_model_said_nothing_is_a_result() -> None:
    sampled = {"type": "message", "role": "assistant", "content": [], "generation_token_ids": [2]}
    cut = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}, "output": []}
    for answer in ({"output": [], "usage": {"output_tokens": 1}}, {"output": [sampled]}, cut):
        assert ask(answer, "responses").message["content"] == ""


def test_bytes_that_are_not_utf_8_are_a_bad_answer() -> None:
    assert kind_of('{"choices":[{"message":{"content":"\xe9"}}]}'.encode("latin-1")) is FailureKind.BAD_ANSWER


@pytest.mark.parametrize(
    ("counts", "seen", "said"),
    [
        ({"prompt_tokens": 5.0, "completion_tokens": 3.0}, 5, 3),
        ({"prompt_tokens": -1, "completion_tokens": "3"}, 0, 0),
        ({"prompt_tokens": 5.5, "completion_tokens": True}, 0, 0),
        ({"prompt_tokens": None, "completion_tokens": [3]}, 0, 0),
        ("none", 0, 0),
        ([], 0, 0),
    ],
)
def test_odd_numbers_of_tokens_do_not_spoil_a_good_answer(counts: Any, seen: int, said: int) -> None:
    usage = ask(chat({"content": "4"}, usage=counts)).usage
    assert usage == (Usage(seen, said) if seen else None)  # unknown is not zero


def test_odd_details_of_tokens_are_none() -> None:
    details = {"prompt_tokens_details": [1], "completion_tokens_details": {"reasoning_tokens": 2.0}}
    usage = ask(chat({"content": "4"}, usage={"completion_tokens": 3, **details})).usage
    assert (usage.cached_tokens, usage.reasoning_tokens) == (0, 2)
