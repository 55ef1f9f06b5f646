"""Between the two dialects of the OpenAI API: Responses items and chat messages.

Rows of collections speak Responses (`responses_create_params.input`, `response.output`); environments and
most servers speak chat. Inside, a conversation is always chat messages.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rollbook.rollouts.types import Message

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
# A call: where its arguments are. A custom tool takes text as it is, which chat has for arguments as well.
_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
_NO_ARGUMENTS = {"function_call": "{}", "custom_tool_call": ""}
_RESULTS = frozenset({"function_call_output", "custom_tool_call_output"})
_ITEM, _PART = '{"role": "user", "content": "..."}', '{"type": "input_text", "text": "..."}'
_KEPT = ("tool_calls", "tool_call_id", "name", "reasoning_content")
_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text"})


def to_chat(items: str | Sequence[Mapping[str, Any]], instructions: str | None = None) -> list[Message]:
    """Responses input, or output, items as chat messages."""
    messages: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    reasoning = ""
    for place, item in enumerate(items):
        if type(item) is not dict and not isinstance(item, Mapping):  # the first asks in no time
            raise TypeError(f"item {place} of the messages is {item!r:.100}; write it like {_ITEM}")
        kind = item.get("type") or "message"
        if kind == "reasoning":
            reasoning += _reasoning_text(item)
        elif kind in _CALLS:
            reply = _open_reply(messages, reasoning)
            reasoning = ""
            call = {"name": item.get("name"), "arguments": item.get(_CALLS[kind]) or _NO_ARGUMENTS[kind]}
            reply.setdefault("tool_calls", []).append(
                {"id": item.get("call_id") or item.get("id"), "type": "function", "function": call}
            )
        elif kind in _RESULTS or kind == "message":
            reply = _chat_message(item, kind)
            if reply["role"] == "assistant" and reasoning:
                reply.setdefault("reasoning_content", reasoning)
            elif reasoning:
                messages.append(_thought(reasoning))
            reasoning = ""
            _append(messages, reply)
    # Other items (a search the server made itself) have no place in chat; the stored response keeps them.
    return [*messages, _thought(reasoning)] if reasoning else messages


def one_reply(messages: Sequence[Message]) -> Message:
    """The assistant messages of one response as the one message they are in chat."""
    texts = [text for text in map(text_of, messages) if text]
    thoughts = [message["reasoning_content"] for message in messages if message.get("reasoning_content")]
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    reply: Message = {"role": "assistant", "content": "\n\n".join(texts)}
    if thoughts:
        reply["reasoning_content"] = "\n\n".join(thoughts)
    if calls:
        reply["tool_calls"] = calls
    return reply


def from_chat(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Chat messages as Responses items: reasoning, messages, function calls and their outputs."""
    items: list[dict[str, Any]] = []
    for message in messages:
        role = message.get("role")
        if role == "tool":
            output = _plain_text(message.get("content"))
            items.append(
                {"type": "function_call_output", "call_id": message.get("tool_call_id"), "output": output}
            )
        elif role == "assistant":
            items += _assistant_items(message)
        else:
            content = _input_content(message.get("content"))
            items.append({"type": "message", "role": role, "content": content})
    return items


def chat_tools(tools: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tool definitions in chat's nesting, from either."""
    converted: list[dict[str, Any]] = []
    for tool in tools:
        if tool.get("type") == "function" and "function" not in tool:
            function = {key: value for key, value in tool.items() if key != "type" and value is not None}
            converted.append({"type": "function", "function": function})
        else:
            converted.append(dict(tool))
    return converted


def responses_tools(tools: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tool definitions in Responses' flat form, from either."""
    return [
        {"type": "function", **tool["function"]} if isinstance(tool.get("function"), Mapping) else dict(tool)
        for tool in tools
    ]


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


def text_of(message: Mapping[str, Any]) -> str:
    """What a message says, without reasoning and tool calls."""
    return _plain_text(message.get("content"))


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


def _chat_message(item: Mapping[str, Any], kind: str) -> Message:
    if kind in _RESULTS:
        output = _text_or_parts(item.get("output"))
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
    role = item.get("role") or "user"
    message = {
        "role": "system" if role == "developer" else role,
        "content": _text_or_parts(item.get("content")),
    }
    if len(item) > 2 or "content" not in item:  # a row in chat form already keeps its further keys
        message |= {key: item[key] for key in _KEPT if item.get(key)}
    return message


def _thought(reasoning: str) -> Message:
    """A reply that was cut off while still thinking."""
    return {"role": "assistant", "content": "", "reasoning_content": reasoning}


def _open_reply(messages: list[Message], reasoning: str) -> Message:
    """The assistant message a call belongs to: the one just before it, or a new one."""
    if not reasoning and messages and messages[-1]["role"] == "assistant":
        return messages[-1]
    _append(messages, _thought(reasoning) if reasoning else {"role": "assistant", "content": ""})
    return messages[-1]


def _append(messages: list[Message], message: Message) -> None:
    """What is said between a call and its result belongs to the call: in chat, results follow at once."""
    if message["role"] == "assistant" and messages and messages[-1].get("tool_calls"):
        messages[-1] = one_reply([messages[-1], message])
    else:
        messages.append(message)


def _text_or_parts(content: Any) -> Any:
    """Text where all parts are text, chat parts otherwise."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        return str(content)
    parts = [_chat_part(part) for part in content]
    if all(part.get("type") == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _chat_part(part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        raise TypeError(f"a part of a message is {part!r:.100}; write it like {_PART}")
    kind = part.get("type")
    if kind in _TEXT_PARTS:
        return {"type": "text", "text": part.get("text") or part.get("refusal") or ""}
    if kind == "input_image":
        image = {"url": part.get("image_url"), "detail": part.get("detail")}
        return {"type": "image_url", "image_url": {k: v for k, v in image.items() if v is not None}}
    return dict(part)


def _input_content(content: Any) -> Any:
    """What a user or system message holds, in the parts of Responses."""
    if not isinstance(content, list):
        return "" if content is None else content
    return [_input_part(_chat_part(part)) for part in content]


def _input_part(part: dict[str, Any]) -> dict[str, Any]:
    if part.get("type") == "text":
        return {"type": "input_text", "text": part["text"]}
    image = part.get("image_url")
    if part.get("type") == "image_url" and isinstance(image, Mapping):
        detail = {"detail": image["detail"]} if image.get("detail") else {}
        return {"type": "input_image", "image_url": image.get("url"), **detail}
    return part


def _plain_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(part["text"] for part in map(_chat_part, content) if part.get("type") == "text")
    return "" if content is None else str(content)


def _reasoning_text(item: Mapping[str, Any]) -> str:
    parts = item.get("content") or item.get("summary") or []
    return "".join(part.get("text", "") for part in parts)
