"""A policy that follows a script, and what its mistakes become."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollbook.errors import UsageError
from rollbook.policies.scripted import ScriptedPolicy
from rollbook.rollouts.types import Completion, FailureKind, Request, RolloutFailure

ASKED = Request(({"role": "user", "content": "two words"},))


def act(script: Any, request: Request = ASKED) -> Completion:
    return asyncio.run(ScriptedPolicy(script).act(request))


def test_a_list_is_followed_turn_by_turn_and_its_last_reply_repeats() -> None:
    # A prompt, too, may hold messages of an assistant.
    examples = ({"role": "assistant", "content": "yes"}, {"role": "user", "content": "go"})
    replies = []
    for turn in range(3):
        request = Request(examples, turn=turn)
        completion = act(["one", {"content": "two", "reasoning_content": "hm"}], request)
        replies.append(completion.message["content"])
    assert replies == ["one", "two", "two"]
    assert completion.message == {"role": "assistant", "content": "two", "reasoning_content": "hm"}


def test_a_function_may_be_sync_or_async_and_return_text_messages_or_completions() -> None:
    async def later(request: Request) -> str:
        await asyncio.sleep(0)
        return "later: " + request.messages[0]["content"]

    assert act(lambda request: "now").message == {"role": "assistant", "content": "now"}
    assert act(later).message["content"] == "later: two words"
    whole = Completion(message={"role": "assistant", "content": "w"}, finish_reason="length")
    assert act(lambda request: whole) is whole


def test_words_are_counted_in_place_of_tokens() -> None:
    usage = act("three more words").usage
    assert (usage.input_tokens, usage.output_tokens) == (2, 3)


def test_a_tool_call_says_so() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert act([{"content": None, "tool_calls": [call]}]).finish_reason == "tool_calls"


@pytest.mark.parametrize("script", [lambda request: 1 / 0, lambda request: None, lambda request: 5])
def test_a_script_that_breaks_is_a_bad_answer(script: Any) -> None:
    with pytest.raises(RolloutFailure) as caught:
        act(script)
    assert caught.value.kind is FailureKind.BAD_ANSWER


def test_a_script_may_fail_on_purpose() -> None:
    def refuse(request: Request) -> str:
        raise RolloutFailure(FailureKind.RATE_LIMIT, "later", status=429, retry_after=3.0)

    with pytest.raises(RolloutFailure) as caught:
        act(refuse)
    assert (caught.value.kind, caught.value.retry_after) == (FailureKind.RATE_LIMIT, 3.0)


def test_an_empty_script_is_refused() -> None:
    with pytest.raises(UsageError):
        ScriptedPolicy([])
