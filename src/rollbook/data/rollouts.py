"""Reads a collected row: its key, prompt, reply and reward.

Rows of this ecosystem hold Responses (`responses_create_params`, `response`); datasets hold chat. Both are
read here, and nowhere else: everything that makes datasets asks these functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rollbook.policies.chat_template import with_objects
from rollbook.policies.conversion import chat_tools, one_reply, to_chat
from rollbook.records.numbers import as_number
from rollbook.rollouts.types import Message

Value = dict[str, Any]


class Unusable(Exception):
    """Why a rollout is no example to learn from; the text is a counter's name."""


class Exchange(NamedTuple):
    """What was asked and what was answered."""

    prompt: list[Message]
    answer: list[Message]  # it ends with the last reply
    tools: list[Value]


def exchange_of(row: Mapping[str, Any]) -> Exchange:
    prompt, answer = prompt_of(row), _until_last_reply(reply_of(row))
    if not prompt:
        raise Unusable("without_prompt")
    if not answer or not all(map(_says_something, answer)):
        raise Unusable("nothing_answered")
    return Exchange(prompt, answer, tools_of(row))


def reward_of(row: Mapping[str, Any]) -> float | None:
    """A missing reward is never a zero."""
    return as_number(row.get("reward"))


def prompt_of(row: Mapping[str, Any]) -> list[Message]:
    """The messages before the first reply; none where the field holds no conversation."""
    params = row.get("responses_create_params")
    if not isinstance(params, Mapping):
        return []
    return with_objects(_chat(params.get("input"), params.get("instructions")))


def reply_of(row: Mapping[str, Any]) -> list[Message]:
    """Everything after the prompt: replies with reasoning and tool calls, tool results, further turns."""
    return with_objects(stored_reply(row))


def stored_reply(row: Mapping[str, Any]) -> list[Message]:
    """The same with the arguments of tool calls as the model wrote them.

    Between two replies somebody else speaks: several messages in a row are parts of one.
    """
    response = row.get("response")
    messages: list[Message] = []
    for message in _chat(response.get("output")) if isinstance(response, Mapping) else []:
        if messages and messages[-1]["role"] == message["role"] == "assistant":
            messages[-1] = one_reply([messages[-1], message])
        else:
            messages.append(message)
    return messages


def tools_of(row: Mapping[str, Any]) -> list[Value]:
    params = row.get("responses_create_params")
    tools = params.get("tools") if isinstance(params, Mapping) else None
    if not tools and isinstance(response := row.get("response"), Mapping):
        tools = response.get("tools")
    if not tools:
        return []
    if not isinstance(tools, list) or not all(map(_is_tool, tools)):
        raise Unusable("unreadable_tools")
    return chat_tools(tools)


def _until_last_reply(messages: list[Message]) -> list[Message]:
    """What an environment said after the last reply teaches nothing."""
    while messages and messages[-1]["role"] != "assistant":
        messages = messages[:-1]
    return messages


def _says_something(message: Message) -> bool:
    """A reply of nothing but reasoning or blanks would teach to say nothing."""
    content = message.get("content")
    is_empty = not content.strip() if isinstance(content, str) else not content
    return message["role"] != "assistant" or not is_empty or bool(message.get("tool_calls"))


def _chat(items: Any, instructions: Any = None) -> list[Message]:
    if not isinstance(items, list | str) or not items:
        return []
    try:
        messages = to_chat(items, instructions)
        calls = [call for message in messages for call in message.get("tool_calls") or ()]
        return messages if all(isinstance(call.get("function") or {}, dict) for call in calls) else []
    except (TypeError, KeyError, AttributeError, ValueError):  # an item that is no message
        return []


def _is_tool(tool: Any) -> bool:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("parameters") or {}, Mapping)
