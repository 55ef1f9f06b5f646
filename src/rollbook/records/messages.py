"""Conversations in one form: Responses items and chat messages as chat messages, tools in chat's nesting.

What is read here is said the same way by whoever wrote it, so it is also what digests of prompts are made of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Message = dict[str, Any]

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


def text_of(message: Mapping[str, Any]) -> str:
    """What a message says, without reasoning and tool calls."""
    return plain_text(message.get("content"))


def _chat_message(item: Mapping[str, Any], kind: str) -> Message:
    if kind in _RESULTS:
        output = text_or_parts(item.get("output"))
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
    role = item.get("role") or "user"
    message = {
        "role": "system" if role == "developer" else role,
        "content": text_or_parts(item.get("content")),
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


def text_or_parts(content: Any) -> Any:
    """Text where all parts are text, chat parts otherwise."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        return str(content)
    parts = [chat_part(part) for part in content]
    if all(part.get("type") == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def chat_part(part: Any) -> dict[str, Any]:
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


def plain_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(part["text"] for part in map(chat_part, content) if part.get("type") == "text")
    return "" if content is None else str(content)


def _reasoning_text(item: Mapping[str, Any]) -> str:
    parts = item.get("content") or item.get("summary") or []
    return "".join(part.get("text", "") for part in parts)
