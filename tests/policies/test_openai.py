"""The OpenAI policy against real sockets: what it sends, what it reads, and every way a server can fail."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from email.utils import formatdate
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_servers import Told, chat_answer, serving, serving_bytes
from rollbook.errors import UsageError
from rollbook.policies.openai import OpenAIPolicy, OpenAISettings
from rollbook.rollouts.types import Completion, FailureKind, Request, RolloutFailure

QUESTION = [{"role": "user", "content": "2 + 2?"}]
TOOL = {"type": "function", "name": "calc", "parameters": {"type": "object"}, "strict": True}


async def _act(base_url: str, request: Request | None = None, **options: Any) -> Completion:
    policy = OpenAIPolicy(OpenAISettings(base_url=base_url, model="m", **options))
    try:
        return await policy.act(request or Request(QUESTION))
    finally:
        await policy.close()


def ask(handler: Callable[..., Any], request: Request | None = None, **options: Any) -> Completion:
    async def run() -> Completion:
        async with serving(handler) as url:
            return await _act(url, request, **options)

    return asyncio.run(run())


def failure(handler: Callable[..., Any], **options: Any) -> RolloutFailure:
    with pytest.raises(RolloutFailure) as caught:
        ask(handler, **options)
    return caught.value


def test_chat_answer_with_everything_is_read() -> None:
    call = {"id": "t1", "type": "function", "function": {"name": "calc", "arguments": "{}"}}
    answer = chat_answer("four", reasoning_content="2 and 2", tool_calls=[call])
    answer["choices"][0] |= {
        "finish_reason": "tool_calls",
        "token_ids": [7, 8],
        "logprobs": {"content": [{"token": "f", "logprob": -0.5}, {"token": "our", "logprob": -0.25}]},
    }
    answer |= {
        "prompt_token_ids": [1, 2, 3],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "prompt_tokens_details": {"cached_tokens": 1},
            "completion_tokens_details": {"reasoning_tokens": 1},
        },
    }
    completion = ask(Told(answer))
    assert completion.message == {
        "role": "assistant",
        "content": "four",
        "reasoning_content": "2 and 2",
        "tool_calls": [call],
    }
    assert (completion.finish_reason, completion.model, completion.id) == ("tool_calls", "served", "c1")
    assert (completion.prompt_token_ids, completion.token_ids) == ([1, 2, 3], [7, 8])
    assert completion.logprobs == [-0.5, -0.25]
    usage = completion.usage
    assert (usage.input_tokens, usage.output_tokens) == (3, 2)
    assert (usage.cached_tokens, usage.reasoning_tokens) == (1, 1)


def test_a_refusal_is_what_was_said() -> None:
    completion = ask(Told(chat_answer(content=None, refusal="I will not.")))
    assert completion.message["content"] == "I will not."


def test_chat_request_speaks_chat() -> None:
    answer = chat_answer("4")
    answer["choices"][0]["token_ids"] = [19]
    server = Told(answer)
    params = {
        "max_output_tokens": 9,
        "temperature": None,
        "tool_choice": {"type": "function", "name": "calc"},
        "truncation": "auto",
        "metadata": {"extra_body": '{"seed": 3}'},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
    }
    request = Request(QUESTION, tools=[TOOL], params=params)
    ask(server, request, params={"temperature": 0.5, "max_output_tokens": 5}, return_tokens=True)
    (body,) = server.asked
    assert server.paths == ["/v1/chat/completions"]
    assert body == {
        "model": "m",
        "messages": QUESTION,
        "max_tokens": 9,
        "temperature": 0.5,  # the row's null does not undo the policy's
        "tool_choice": {"type": "function", "function": {"name": "calc"}},
        "seed": 3,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
        "tools": [
            {
                "type": "function",
                "function": {"name": "calc", "parameters": {"type": "object"}, "strict": True},
            }
        ],
        "logprobs": True,
        "return_token_ids": True,
    }


def test_no_choice_between_no_tools_is_sent() -> None:
    server = Told(chat_answer("4"))
    params = {"tool_choice": "auto", "parallel_tool_calls": True, "max_output_tokens": 3}
    ask(server, Request(QUESTION, params=params), max_tokens_key="max_completion_tokens")
    assert server.asked == [{"model": "m", "messages": QUESTION, "max_completion_tokens": 3}]


def test_responses_answer_of_several_items_is_one_reply() -> None:
    output = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "and"}], "summary": []},
        {"type": "function_call", "call_id": "a", "name": "calc", "arguments": '{"e": 1}'},
        {"type": "function_call", "call_id": "b", "name": "calc", "arguments": "{}"},
        {"type": "web_search_call", "id": "ws"},
    ]
    answer = {
        "id": "r1",
        "model": "served",
        "status": "completed",
        "output": output,
        "usage": {
            "input_tokens": 5,
            "output_tokens": 6,
            "input_tokens_details": {"cached_tokens": 2},
            "output_tokens_details": {"reasoning_tokens": 4},
        },
    }
    server = Told(answer)
    completion = ask(server, Request(QUESTION, tools=[TOOL]), api="responses")
    assert completion.message["content"] == "I look."
    assert completion.message["reasoning_content"] == "hm\n\nand"
    assert [call["id"] for call in completion.message["tool_calls"]] == ["a", "b"]
    assert completion.finish_reason == "tool_calls"
    assert completion.usage.input_tokens == 5
    assert (completion.usage.cached_tokens, completion.usage.reasoning_tokens) == (2, 4)
    assert server.paths == ["/v1/responses"]
    assert server.asked[0]["tools"] == [TOOL]
    assert server.asked[0]["input"] == [{"type": "message", "role": "user", "content": "2 + 2?"}]


def test_responses_request_keeps_its_own_parameters() -> None:
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "4"}]}
    server = Told({"output": [said]})
    params = {
        "max_output_tokens": 9,
        "metadata": {"extra_body": '{"seed": 3}', "who": "me"},
        "top_p": None,
        "stream": True,
    }
    ask(server, Request(QUESTION, params=params), api="responses")
    assert {key: value for key, value in server.asked[0].items() if key != "input"} == {
        "model": "m",
        "max_output_tokens": 9,
        "metadata": {"who": "me"},
        "seed": 3,
    }


def test_reply_cut_off_while_thinking_keeps_its_thoughts() -> None:
    answer = {
        "status": "incomplete",
        "incomplete_details": {"reason": "max_output_tokens"},
        "output": [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "so then"}]}],
    }
    completion = ask(Told(answer), api="responses")
    assert completion.message == {"role": "assistant", "content": "", "reasoning_content": "so then"}
    assert completion.finish_reason == "length"


def test_failed_response_is_a_failure_and_not_an_empty_answer() -> None:
    answer = {"status": "failed", "error": {"message": "engine died"}, "output": []}
    failed = failure(Told(answer), api="responses")
    assert failed.kind is FailureKind.SERVER_ERROR
    assert "engine died" in str(failed)
    broken = chat_answer("half of")
    broken["choices"][0]["finish_reason"] = "error"
    assert failure(Told(broken)).kind is FailureKind.SERVER_ERROR


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, FailureKind.INVALID_REQUEST),
        (401, FailureKind.INVALID_REQUEST),
        (404, FailureKind.INVALID_REQUEST),
        (408, FailureKind.SERVER_ERROR),
        (429, FailureKind.RATE_LIMIT),
        (500, FailureKind.SERVER_ERROR),
        (503, FailureKind.SERVER_ERROR),
    ],
)
def test_a_status_is_a_kind_of_failure(status: int, kind: FailureKind) -> None:
    failed = failure(Told({"error": "so it is"}, status=status))
    assert (failed.kind, failed.status, failed.retry_after) == (kind, status, None)
    assert "so it is" in str(failed)


def test_refused_key_says_where_keys_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "k")
    refused = failure(Told({}, status=401), api_key_env="MINE")
    assert "the key comes from policy.api_key_env, now 'MINE'" in str(refused)


def test_a_refusal_without_a_key_says_how_to_set_one() -> None:
    said = str(failure(Told({}, status=401)))
    assert "no key is sent; type export MY_API_KEY=... and set policy.api_key_env: MY_API_KEY" in said


def test_retry_after_in_seconds_milliseconds_and_as_a_date() -> None:
    def waits(headers: dict[str, str]) -> float | None:
        return failure(Told({}, status=429, headers=headers)).retry_after

    assert waits({"Retry-After": "7"}) == 7.0
    assert waits({"Retry-After": "1.5"}) == 1.5
    assert waits({"retry-after-ms": "250", "Retry-After": "7"}) == 0.25
    ahead = waits({"Retry-After": formatdate(time.time() + 3600, usegmt=True)})
    assert ahead is not None
    assert 3000 < ahead <= 3600
    assert waits({"Retry-After": formatdate(time.time() - 3600, usegmt=True)}) == 0.0
    assert waits({"Retry-After": "soon"}) is None
    for endless in ("inf", "nan", "9" * 400, "1e999"):
        assert waits({"Retry-After": endless}) is None
        assert waits({"retry-after-ms": endless}) is None
        assert waits({"retry-after-ms": endless, "Retry-After": "7"}) == 7.0
    assert waits({"retry-after-ms": "-5"}) == 0.0


GARBAGE = [
    b"",
    b"<html>502</html>",
    b"\xff\xfe",
    b"null",
    b"[]",
    b"{}",
    b'{"choices": []}',
    b'{"choices": [{}]}',
    b'{"choices": [{"message": {"content": 5}}]}',
    b'{"choices": [{"message": {"content": "a"}}',
    b'{"error": {"message": "overloaded"}}',
    b"[" * 100_000,
    b'{"output": 5}',
    b'{"output": [5]}',
    b'{"output": [{"type": "message", "role": "assistant", "content": [5]}]}',
    b'{"output": [{"type": "reasoning", "content": "text"}]}',
]


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("body", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_is_a_bad_answer(body: bytes, api: str) -> None:
    failed = failure(Told(body), api=api)
    assert failed.kind is FailureKind.BAD_ANSWER
    assert "answered 200" in str(failed)


_KEYS = ["choices", "message", "content", "output", "type", "role", "tool_calls", "text", "usage", "summary"]
_LEAVES = st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from(["message", "reasoning", "x"])
_JSON = st.recursive(
    _LEAVES,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.sampled_from(_KEYS), below, max_size=4),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(_JSON, st.sampled_from(["chat", "responses"]))
def test_any_json_is_a_completion_or_a_failure(body: Any, api: str) -> None:
    try:
        assert isinstance(ask(Told(body), api=api), Completion)
    except RolloutFailure as failed:
        assert failed.kind in (FailureKind.BAD_ANSWER, FailureKind.SERVER_ERROR)


def _broken(answer: bytes | None, **options: Any) -> RolloutFailure:
    async def run() -> None:
        async with serving_bytes(answer) as url:
            await _act(url, **options)

    with pytest.raises(RolloutFailure) as caught:
        asyncio.run(run())
    return caught.value


def test_half_a_body_is_a_transport_failure() -> None:
    half = (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n" + b'{"choices": ['
    )
    assert _broken(half).kind is FailureKind.TRANSPORT
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\nabc"
    assert _broken(chunked).kind is FailureKind.TRANSPORT


def test_hanging_up_and_nonsense_are_transport_failures() -> None:
    assert _broken(b"").kind is FailureKind.TRANSPORT
    assert _broken(b"HTTP/1.1 200").kind is FailureKind.TRANSPORT
    assert _broken(b"SSH-2.0-OpenSSH_9.9\r\n").kind is FailureKind.TRANSPORT


def test_a_server_that_never_answers_is_a_timeout() -> None:
    failed = _broken(None, total_timeout_s=0.3)
    assert failed.kind is FailureKind.TIMEOUT
    assert "0.3 s" in str(failed)


def test_a_body_that_never_ends_is_a_timeout() -> None:
    async def trickle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'{"choices": [')
        await asyncio.sleep(30)
        return response

    assert failure(trickle, total_timeout_s=0.3).kind is FailureKind.TIMEOUT


def test_nobody_there_is_a_connect_failure() -> None:
    async def run() -> None:
        async with serving_bytes(b"") as url:
            gone = url
        await _act(gone)

    with pytest.raises(RolloutFailure) as caught:
        asyncio.run(run())
    assert caught.value.kind is FailureKind.CONNECT


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "s3cret")
    server = Told(chat_answer("4"))
    ask(server, api_key_env="SOME_KEY", headers={"X-Team": "red"})
    assert server.request_headers[0]["Authorization"] == "Bearer s3cret"
    assert server.request_headers[0]["X-Team"] == "red"
    monkeypatch.delenv("SOME_KEY")
    with pytest.raises(UsageError, match="export SOME_KEY="):
        OpenAIPolicy(OpenAISettings(base_url="http://h/v1", model="m", api_key_env="SOME_KEY"))


@pytest.mark.parametrize("url", ["localhost:8000/v1", "", "ftp://h/v1", "http://", "http://h:99999/v1"])
def test_a_base_url_that_is_none_is_refused_at_once(url: str) -> None:
    with pytest.raises(UsageError, match=r"policy\.base_url"):
        OpenAIPolicy(OpenAISettings(base_url=url, model="m"))


def test_a_request_that_is_not_json_is_invalid() -> None:
    for content in ("\ud800", {1, 2}):
        with pytest.raises(RolloutFailure) as caught:
            ask(Told(chat_answer("4")), Request(({"role": "user", "content": content},)))
        assert caught.value.kind is FailureKind.INVALID_REQUEST


def test_a_number_of_any_length_is_sent_as_it_is() -> None:
    server = Told(chat_answer("4"))
    ask(server, Request(QUESTION, params={"seed": 1 << 80}))
    assert server.asked[0]["seed"] == 1 << 80


def test_one_policy_serves_many_at_once() -> None:
    async def echo(request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        return web.json_response(chat_answer(asked["messages"][0]["content"]))

    async def run() -> list[str]:
        async with serving(echo) as url:
            policy = OpenAIPolicy(OpenAISettings(base_url=url + "/", model="m"))
            requests = [Request(({"role": "user", "content": str(n)},)) for n in range(300)]
            completions = await asyncio.gather(*map(policy.act, requests))
            await policy.close()
            await policy.close()
            return [completion.message["content"] for completion in completions]

    assert asyncio.run(run()) == [str(n) for n in range(300)]
