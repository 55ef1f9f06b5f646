"""The `response` of a collected line is what clients of the Responses API take for one.

The schema is written from the documentation of the API (the fields that are required, their types, their
fixed words). `make test-interop` has the same lines checked by the package openai itself.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from collecting import config, results, run, small_input
from fake_servers import Told, chat_answer, serving
from rollbook.collect.items import Item
from rollbook.collect.rows import output_line
from rollbook.records.turns import Turn, Usage
from rollbook.rollouts.types import Episode, Task

Status = Literal["in_progress", "completed", "incomplete"]


class Text(msgspec.Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any]


class Message(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    content: list[Text]
    role: Literal["assistant"]
    status: Status


class Call(msgspec.Struct, tag_field="type", tag="function_call"):
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None


class CallOutput(msgspec.Struct, tag_field="type", tag="function_call_output"):
    id: str
    call_id: str
    output: str
    status: Status


class Thought(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    text: str


class Reasoning(msgspec.Struct, tag_field="type", tag="reasoning"):
    id: str
    summary: list[Any]
    content: list[Thought] | None = None
    status: Status | None = None


class Function(msgspec.Struct, tag_field="type", tag="function"):
    name: str
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class InputDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(msgspec.Struct):
    reasoning_tokens: int


class Used(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Incomplete(msgspec.Struct):
    reason: Literal["max_output_tokens", "content_filter"] | None = None


class Response(msgspec.Struct):
    id: str
    object: Literal["response"]
    created_at: float
    model: str
    output: list[Message | Call | CallOutput | Reasoning]
    parallel_tool_calls: bool
    tool_choice: Literal["none", "auto", "required"]
    tools: list[Function]
    status: Literal["completed", "failed", "in_progress", "cancelled", "queued", "incomplete"] | None = None
    incomplete_details: Incomplete | None = None
    error: None = None
    usage: Used | None = None


ADD = {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
SAID = {"role": "assistant", "content": "It is 4."}
THOUGHT = {"role": "assistant", "content": "", "reasoning_content": "so then"}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RETURNED = {"role": "tool", "tool_call_id": "call_1", "content": "4"}
TURNS = [Turn(messages=[CALLED, RETURNED], usage=Usage(5, 2), reward=0.0), Turn(messages=[SAID], reward=1.0)]
EPISODES = {
    "one reply": Episode([], turns=[Turn(messages=[SAID], usage=Usage(5, 3), reward=1.0)], model="m"),
    "thoughts": Episode([], turns=[Turn(messages=[THOUGHT], reward=0.0)], stop_reason="length"),
    "a tool": Episode([], tools=[{"type": "function", "function": ADD}], turns=TURNS, response_id="r"),
    "too many turns": Episode([], turns=TURNS, stop_reason="max_turns", created_at=7.0),
    "filtered": Episode([], turns=TURNS, stop_reason="content_filter"),
}


def responses() -> dict[str, bytes]:
    """The `response` of a line for each of EPISODES, as JSON."""
    made = {}
    for name, episode in EPISODES.items():
        row = {"responses_create_params": {"input": "q", "parallel_tool_calls": None}}
        task = Task(id=name, row=row, messages=[], params=row["responses_create_params"])
        line = output_line(Item(0, 0, name, b"{}"), task, episode)
        made[name] = msgspec.json.encode(msgspec.json.decode(line)["response"])
    return made


@pytest.mark.parametrize("name", EPISODES)
def test_it_is_one_of_the_api(name: str) -> None:
    response = msgspec.json.decode(responses()[name], type=Response)
    ids = [item.id for item in response.output]
    assert len(set(ids)) == len(ids) and None not in ids


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_the_id_and_the_time_are_the_servers(api: str, tmp_path: Path) -> None:
    small_input(tmp_path, 1)
    answers = {
        "chat": chat_answer("2") | {"id": "chatcmpl-7", "created": 1_700_000_000},
        "responses": {
            "id": "chatcmpl-7",
            "created_at": 1_700_000_000,
            "output": [
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "2"}]}
            ],
        },
    }

    async def collected() -> None:
        async with serving(Told(answers[api])) as url:
            config(tmp_path, {"kind": "openai", "base_url": url, "model": "m", "api": api})
            await asyncio.to_thread(run, tmp_path)

    asyncio.run(collected())
    (line,) = results(tmp_path / "out.jsonl")
    response = msgspec.convert(line["response"], Response, strict=False)
    assert (response.id, response.created_at) == ("chatcmpl-7", 1_700_000_000)


def test_an_odd_time_spoils_no_answer(tmp_path: Path) -> None:
    small_input(tmp_path, 1)

    async def collected() -> int:
        async with serving(Told(chat_answer("2") | {"created": "today"})) as url:
            config(tmp_path, {"kind": "openai", "base_url": url, "model": "m"})
            return (await asyncio.to_thread(run, tmp_path)).done

    assert asyncio.run(collected()) == 1
    (line,) = results(tmp_path / "out.jsonl")
    assert isinstance(line["response"]["created_at"], float)
