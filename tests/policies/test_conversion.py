"""Chat and Responses say the same thing in two ways; going there and back must lose nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.policies.conversion import (
    chat_params,
    chat_tools,
    extra_body,
    from_chat,
    one_reply,
    responses_params,
    responses_tools,
    text_of,
    to_chat,
)

TEXT = st.text(max_size=20)
NAME = st.text(alphabet="abcdefgh_", min_size=1, max_size=8)


@st.composite
def _calls(draw: st.DrawFn) -> list[dict[str, Any]]:
    names = draw(st.lists(NAME, min_size=1, max_size=3))
    return [
        {"id": f"call-{at}", "type": "function", "function": {"name": name, "arguments": '{"a": 1}'}}
        for at, name in enumerate(names)
    ]


@st.composite
def _reply(draw: st.DrawFn) -> list[dict[str, Any]]:
    """An assistant's message, and the results of the tools it calls."""
    message: dict[str, Any] = {"role": "assistant", "content": draw(TEXT)}
    if thought := draw(st.none() | st.text(min_size=1, max_size=20)):
        message["reasoning_content"] = thought
    if not draw(st.booleans()):
        return [message]
    message["tool_calls"] = calls = draw(_calls())
    return [message, *({"role": "tool", "tool_call_id": c["id"], "content": draw(TEXT)} for c in calls)]


IMAGE = {"type": "image_url", "image_url": {"url": "https://x/i.png", "detail": "low"}}
PARTS = st.lists(st.builds(lambda t: {"type": "text", "text": t}, TEXT) | st.just(IMAGE), max_size=2).map(
    lambda parts: [*parts, IMAGE]
)
USER = st.builds(lambda content: {"role": "user", "content": content}, TEXT | PARTS)
SYSTEM = st.builds(lambda content: {"role": "system", "content": content}, TEXT)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    messages = draw(st.lists(SYSTEM, max_size=1))
    for _ in range(draw(st.integers(1, 4))):
        messages += [draw(USER), *draw(_reply())]
    return messages


@settings(deadline=None)
@given(conversations())
def test_chat_to_responses_and_back_is_the_same(messages: list[dict[str, Any]]) -> None:
    items = from_chat(messages)
    assert to_chat(items) == messages
    assert to_chat(json.loads(json.dumps(items))) == messages


@settings(deadline=None)
@given(conversations())
def test_chat_rows_are_taken_as_they_are(messages: list[dict[str, Any]]) -> None:
    """Rows whose input is already chat, as much of this ecosystem writes it."""
    assert to_chat(messages) == messages


def test_a_chat_message_without_content_keeps_its_calls() -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    said = {"role": "assistant", "tool_calls": calls}
    assert to_chat([said]) == [{**said, "content": ""}]


@settings(deadline=None)
@given(conversations())
def test_every_item_is_one_responses_knows(messages: list[dict[str, Any]]) -> None:
    for item in from_chat(messages):
        assert item["type"] in ("message", "reasoning", "function_call", "function_call_output")
        if item["type"] == "message" and isinstance(item["content"], list):
            kinds = {part["type"] for part in item["content"]}
            assert kinds <= {"input_text", "input_image", "output_text"}


def test_instructions_and_plain_text_become_messages() -> None:
    assert to_chat("hello", "be brief") == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
    ]
    developer = to_chat([{"role": "developer", "content": [{"type": "input_text", "text": "be brief"}]}])
    assert developer == [{"role": "system", "content": "be brief"}]


@pytest.mark.parametrize(
    ("items", "said"),
    [
        ([{"role": "user", "content": "a"}, 5], r"item 1 of the messages is 5; write it like \{"),
        ([None], "item 0 of the messages is None"),
        ([{"role": "user", "content": [7]}], "a part of a message is 7; write it like"),
    ],
)
def test_what_is_no_message_is_named_by_its_place(items: list[Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        to_chat(items)


def test_an_extra_body_that_is_no_json_is_named() -> None:
    with pytest.raises(ValueError, match=r"metadata\.extra_body is no JSON"):
        chat_params({"metadata": {"extra_body": "{top_k: 5}"}})
    assert extra_body({"metadata": "of another shape"}) == {}


def test_items_without_a_place_in_chat_leave_no_empty_message() -> None:
    items = [
        {"type": "message", "role": "user", "content": "find it"},
        {"type": "web_search_call", "id": "w"},
        {"type": "item_reference", "id": "i"},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ]
    assert to_chat(items) == [
        {"role": "user", "content": "find it"},
        {"role": "assistant", "content": "no"},
    ]


def _call(name: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": name, "name": "f", "arguments": "{}"}


def _result(name: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": name, "output": f"of {name}"}


def test_calls_made_before_any_result_are_one_message_whatever_was_said_between_them() -> None:
    thoughts = [
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}
        for text in ("first", "second")
    ]
    said = {"type": "message", "role": "assistant", "content": "one moment"}
    made = to_chat([thoughts[0], _call("a"), thoughts[1], _call("b"), said, _result("a"), _result("b")])
    assert [message["role"] for message in made] == ["assistant", "tool", "tool"]
    assert [call["id"] for call in made[0]["tool_calls"]] == ["a", "b"]
    assert made[0]["reasoning_content"] == "first\n\nsecond" and made[0]["content"] == "one moment"
    later = to_chat([_call("a"), _result("a"), thoughts[0], _call("b")])
    assert [message["role"] for message in later] == ["assistant", "tool", "assistant"]


def test_calls_of_custom_tools_are_calls() -> None:
    items = [
        {"type": "custom_tool_call", "call_id": "k", "name": "sh", "input": "ls"},
        {"type": "custom_tool_call_output", "call_id": "k", "output": "files"},
    ]
    call = {"id": "k", "type": "function", "function": {"name": "sh", "arguments": "ls"}}
    assert to_chat(items) == [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "k", "content": "files"},
    ]


def test_reasoning_that_nothing_follows_is_kept() -> None:
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    expected = {"role": "assistant", "content": "", "reasoning_content": "hm"}
    assert to_chat([thought]) == [expected]
    assert to_chat([thought, {"role": "user", "content": "well?"}])[0] == expected


def test_one_reply_joins_what_one_response_said() -> None:
    assert one_reply([]) == {"role": "assistant", "content": ""}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = [
        {"role": "assistant", "content": "first", "reasoning_content": "hm"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    assert one_reply(said) == {
        "role": "assistant",
        "content": "first",
        "reasoning_content": "hm",
        "tool_calls": [call],
    }


def test_tools_take_either_form() -> None:
    flat = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
    nested = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}
    assert chat_tools([flat]) == chat_tools([nested]) == [nested]
    assert responses_tools([flat]) == responses_tools([nested]) == [flat]


def test_parameters_of_one_dialect_stay_out_of_the_other() -> None:
    params = {
        "max_output_tokens": 5,
        "previous_response_id": "r",
        "include": ["x"],
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "json_object"}},
        "top_k": 3,
        "top_p": None,
        "input": "hello",
        "metadata": {"extra_body": {"min_p": 0.1}},
    }
    assert chat_params(params) == {
        "max_tokens": 5,
        "top_k": 3,
        "response_format": {"type": "json_object"},
        "reasoning_effort": "low",
        "min_p": 0.1,
    }
    assert "input" not in responses_params(params)
    assert responses_params(params)["metadata"] == {}
    assert extra_body({"metadata": {"extra_body": "[1]"}}) == {}


ROWS = [
    "example_multi_step_example",
    "example_multi_turn_gymnasium_example",
    "format_verification_example",
]


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_nemo_gym_convert_and_back(peer_fixtures: Path, name: str) -> None:
    for line in (peer_fixtures / "nemo_gym" / f"{name}.jsonl").read_text().splitlines():
        params = json.loads(line)["responses_create_params"]
        messages = to_chat(params["input"], params.get("instructions"))
        assert [text_of(message) for message in messages] == [item["content"] for item in params["input"]]
        assert to_chat(from_chat(messages)) == messages
        tools = params.get("tools") or []
        assert responses_tools(chat_tools(tools)) == tools


@pytest.mark.parametrize("name", ROWS)
def test_rollouts_of_nemo_gym_convert_and_back(peer_fixtures: Path, name: str) -> None:
    for line in (peer_fixtures / "nemo_gym" / f"{name}_rollouts.jsonl").read_text().splitlines():
        output = json.loads(line)["response"]["output"]
        messages = to_chat(output)
        back = from_chat(messages)
        assert to_chat(back) == messages
        told = ("function_call", "function_call_output", "reasoning")
        kinds = [item["type"] for item in output if item["type"] in told]
        assert [item["type"] for item in back if item["type"] in told] == kinds
        calls = [item["arguments"] for item in output if item["type"] == "function_call"]
        assert [item["arguments"] for item in back if item["type"] == "function_call"] == calls
