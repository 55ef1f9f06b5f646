"""Between the two dialects of the OpenAI API: Responses items and chat messages.

Rows of collections speak Responses (`responses_create_params.input`, `response.output`); environments and
most servers speak chat. Inside, a conversation is always chat messages.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from rollbook.records.messages import chat_part, plain_text
from rollbook.records.messages import chat_tools as chat_tools
from rollbook.records.messages import one_reply as one_reply
from rollbook.records.messages import responses_tools as responses_tools
from rollbook.records.messages import text_of as text_of
from rollbook.records.messages import to_chat as to_chat

# Responses name -> chat name of the sampling parameters that mean the same.
_CHAT_PARAMS = {
    "max_output_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "parallel_tool_calls": "parallel_tool_calls",
    "tool_choice": "tool_choice",
    "service_tier": "service_tier",
    "user": "user",
    "seed": "seed",
    "stop": "stop",
    "top_k": "top_k",
    "min_p": "min_p",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",
    "chat_template_kwargs": "chat_template_kwargs",
}
_NOT_SAMPLING = frozenset({"input", "instructions", "tools", "model", "stream"})
_NOT_CHAT = _NOT_SAMPLING | {
    "background",
    "conversation",
    "include",
    "max_tool_calls",
    "metadata",
    "previous_response_id",
    "prompt",
    "reasoning",
    "text",
    "truncation",
}
# What a request by either dialect may hold, to tell a slip of the fingers from a name only an engine knows.
KNOWN_PARAMS = frozenset({*_CHAT_PARAMS, *_CHAT_PARAMS.values(), *_NOT_CHAT}) | {
    "logit_bias",
    "logprobs",
    "max_completion_tokens",
    "n",
    "reasoning_effort",
    "response_format",
    "store",
    "top_logprobs",
}


def from_chat(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Chat messages as Responses items: reasoning, messages, function calls and their outputs."""
    items: list[dict[str, Any]] = []
    for message in messages:
        role = message.get("role")
        if role == "tool":
            output = plain_text(message.get("content"))
            items.append(
                {"type": "function_call_output", "call_id": message.get("tool_call_id"), "output": output}
            )
        elif role == "assistant":
            items += _assistant_items(message)
        else:
            content = _input_content(message.get("content"))
            items.append({"type": "message", "role": role, "content": content})
    return items


def chat_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters of a row for a chat request; unknown ones go along unchanged."""
    body: dict[str, Any] = {}
    if not params:
        return body
    for key, value in params.items():
        if value is not None and key not in _NOT_CHAT:
            body[_CHAT_PARAMS.get(key, key)] = value
    choice = body.get("tool_choice")
    if isinstance(choice, Mapping) and choice.get("type") == "function" and "name" in choice:
        body["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}
    text_format = (params.get("text") or {}).get("format") or {}
    if text_format.get("type") == "json_schema":
        schema = {key: value for key, value in text_format.items() if key != "type"}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif text_format.get("type") == "json_object":
        body["response_format"] = {"type": "json_object"}
    if effort := (params.get("reasoning") or {}).get("effort"):
        body["reasoning_effort"] = effort
    return body | extra_body(params)


def responses_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters of a row for a Responses request."""
    body = {key: value for key, value in params.items() if value is not None and key not in _NOT_SAMPLING}
    if isinstance(metadata := body.get("metadata"), Mapping) and "extra_body" in metadata:
        body["metadata"] = {key: value for key, value in metadata.items() if key != "extra_body"}
    return body


def extra_body(params: Mapping[str, Any]) -> dict[str, Any]:
    """Engine-specific parameters, which this ecosystem passes as JSON text under `metadata.extra_body`."""
    metadata = params.get("metadata")
    text = metadata.get("extra_body") if isinstance(metadata, Mapping) else None
    try:
        extra = json.loads(text) if isinstance(text, str) else text
    except ValueError as error:
        raise ValueError(f"metadata.extra_body is no JSON, {error}: {text!r:.100}") from None
    return extra if isinstance(extra, dict) else {}


def _assistant_items(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        content = [{"type": "reasoning_text", "text": reasoning}]
        items.append({"type": "reasoning", "summary": [], "content": content})
    text = text_of(message)
    calls = message.get("tool_calls") or ()
    if text or not calls:
        content = [{"type": "output_text", "text": text, "annotations": []}]
        items.append({"type": "message", "role": "assistant", "status": "completed", "content": content})
    for call in calls:
        function = call.get("function") or {}
        items.append(
            {
                "type": "function_call",
                "call_id": call.get("id"),
                "name": function.get("name"),
                "arguments": function.get("arguments"),
                "status": "completed",
            }
        )
    return items


def _input_content(content: Any) -> Any:
    """What a user or system message holds, in the parts of Responses."""
    if not isinstance(content, list):
        return "" if content is None else content
    return [_input_part(chat_part(part)) for part in content]


def _input_part(part: dict[str, Any]) -> dict[str, Any]:
    if part.get("type") == "text":
        return {"type": "input_text", "text": part["text"]}
    image = part.get("image_url")
    if part.get("type") == "image_url" and isinstance(image, Mapping):
        detail = {"detail": image["detail"]} if image.get("detail") else {}
        return {"type": "input_image", "image_url": image.get("url"), **detail}
    return part
