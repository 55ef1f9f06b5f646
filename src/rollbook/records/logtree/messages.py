"""Conversations as HTML: roles, reasoning, tool calls with their results, images, and whatever else came.

Formats differ from provider to provider, so everything is looked at rather than assumed: a part of an
unknown type, a field nobody named, a message that is not even a dict is shown, never dropped or raised on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from rollbook.records.logtree.escape import attribute, escape
from rollbook.records.logtree.values import to_text

_ROLE_CLASSES = {
    "system": "sys",
    "developer": "sys",
    "user": "usr",
    "human": "usr",
    "assistant": "ast",
    "tool": "tol",
    "function": "tol",
}
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_CALL_FIELDS = ("tool_calls", "function_call", "unparsed_tool_calls")
_SHOWN_FIELDS = frozenset(
    {"role", "content", "step_idx", "name", "tool_call_id", "refusal", *_CALL_FIELDS, *_REASONING_FIELDS}
)
_PLAIN_FIELDS = frozenset({"role", "content", "step_idx"})  # the order of messages shows the turn
_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})
_REASONING_PARTS = frozenset({"thinking", "reasoning"})
_IMAGE_PARTS = frozenset({"image", "image_url", "input_image"})
_CALL_PARTS = frozenset({"tool_call", "tool_use", "function_call"})
_SAFE_IMAGE = re.compile(r"data:image/(?:png|jpeg|gif|webp);base64,[A-Za-z0-9+/]+={0,2}", re.IGNORECASE)
_CHIP_LENGTH = 40
_LONG_URL = 300


def render_messages(messages: object, out: list[str], anchors: Iterator[str]) -> None:
    """Append the HTML of one conversation; `anchors` yields ids that are unique on the page."""
    listed = messages if isinstance(messages, list) else [messages]
    conversation = _Conversation(out, _answered_calls(listed, anchors))
    for message in listed:
        conversation.message(message if isinstance(message, dict) else {"content": message})


def block(summary: str, body: str, css: str = "d") -> str:
    """A collapsed block; both arguments are HTML already."""
    return f'<details class="{css}"><summary>{summary}</summary>{body}</details>'


def mono(text: str) -> str:
    return f'<p class="k">{escape(text)}</p>'


def pretty(value: object) -> str:
    """JSON over several lines where the value is JSON; otherwise the text as it is."""
    if isinstance(value, str):
        try:
            decoded = json.loads(value, object_pairs_hook=_without_repeats)
        except (ValueError, RecursionError):
            return value
        if not isinstance(decoded, (dict, list)):
            return value
        value = decoded
    try:
        return json.dumps(value, indent=2, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return to_text(value)


class _Conversation:
    def __init__(self, out: list[str], calls: dict[str, tuple[str, str]]) -> None:
        self._out = out
        self._calls = calls  # the answered ones: id -> (anchor, name of the function)

    def message(self, message: dict[Any, Any]) -> None:
        role = message.get("role")
        opening = _opening("no role" if role is None else to_text(role))
        if message.keys() <= _PLAIN_FIELDS and type(message.get("content")) is str:
            self._out += (opening, "<p>", escape(message["content"]), "</p></div>")  # nearly every message
            return
        self._out.append(opening + self._header(message))
        before = len(self._out)
        for field in _REASONING_FIELDS:
            if message.get(field):
                self._out.append(_reasoning(message[field]))
        self._content(message.get("content"))
        if message.get("refusal"):
            self._out.append(f'<p><b class="w">refusal</b> {escape(to_text(message["refusal"]))}</p>')
        for field in ("tool_calls", "function_call"):
            self._out.extend(self._call(call) for call in _listed(message.get(field)))
        self._out.extend(_broken_call(call) for call in _listed(message.get("unparsed_tool_calls")))
        if len(self._out) == before:
            self._out.append('<p class="o">(empty)</p>')
        self._out.append(_other_fields(message) + "</div>")

    def _header(self, message: dict[Any, Any]) -> str:
        chips = [_chip(name, message[name]) for name in message if name not in _SHOWN_FIELDS]
        answered = message.get("tool_call_id")
        if answered is not None:
            chips.insert(0, self._answer_to(answered))
        name = message.get("name")
        if name is not None and (answered is None or name != self._calls.get(to_text(answered), ("", ""))[1]):
            chips.insert(0, f"<small>{escape(to_text(name))}</small>")
        return "".join(chips)

    def _content(self, content: object) -> None:
        if content is None or content == "":
            return
        for part in content if isinstance(content, list) else [content]:
            if isinstance(part, dict):
                self._part(part)
            else:
                self._paragraph(to_text(part))

    def _paragraph(self, text: str) -> None:
        # Three pieces rather than one: the text is long, and each concatenation would copy it.
        self._out += ("<p>", escape(text), "</p>")

    def _part(self, part: dict[Any, Any]) -> None:
        kind = _kind(part)
        text = next((part[key] for key in ("text", "refusal") if isinstance(part.get(key), str)), None)
        if kind in _TEXT_PARTS and text is not None:
            self._paragraph(text)
        elif kind in _REASONING_PARTS:
            keys = ("thinking", "reasoning", "text", "content")
            self._out.append(_reasoning(next((part[key] for key in keys if part.get(key)), part)))
        elif kind in _IMAGE_PARTS:
            self._out.append(_image(part))
        elif kind in _CALL_PARTS:
            self._out.append(self._call(part))
        elif kind == "tool_result":
            identity = part.get("tool_use_id", part.get("tool_call_id"))
            self._out.append('<div class="tr">' + ("" if identity is None else self._answer_to(identity)))
            self._content(part.get("content"))
            self._out.append("</div>")
        else:
            label = "part without a type" if kind is None else f"{kind} part"
            self._out.append(block(escape(label), mono(pretty(part))))

    def _call(self, call: object) -> str:
        name, arguments, identity = _call_fields(call)
        anchor = chip = ""
        if identity is not None:
            chip = f"<small>{escape(identity)}</small>"
            if identity in self._calls:
                anchor = f' id="{self._calls[identity][0]}"'
        body = "" if arguments is None or arguments == "" else mono(pretty(arguments))
        return f'<div class="tc"{anchor}><b>{escape(name)}</b>{chip}{body}</div>'

    def _answer_to(self, identity: object) -> str:
        text = to_text(identity)
        if text not in self._calls:
            return f"<small>{escape(text)}</small>"
        anchor, name = self._calls[text]
        return f'<small>answers <a href="#{anchor}">{escape(name)}</a> {escape(text)}</small>'


@lru_cache(maxsize=64)
def _opening(role: str) -> str:
    return f'<div class="m {_ROLE_CLASSES.get(role.lower(), "unk")}"><b>{escape(role)}</b>'


def _answered_calls(messages: list[Any], anchors: Iterator[str]) -> dict[str, tuple[str, str]]:
    """The calls that a later message answers: id -> (anchor, name of the function)."""
    names: dict[str, str] = {}
    answered: dict[str, tuple[str, str]] = {}
    for message in messages:
        if not isinstance(message, dict):
            continue
        if message.keys() <= _PLAIN_FIELDS and type(message.get("content")) is str:
            continue
        content = message.get("content")
        parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
        calls = [part for part in parts if _kind(part) in _CALL_PARTS]
        for call in [*_listed(message.get("tool_calls")), *calls]:
            name, _, identity = _call_fields(call)
            if identity is not None:
                names.setdefault(identity, name)
        for answer in [message.get("tool_call_id"), *(part.get("tool_use_id") for part in parts)]:
            identity = None if answer is None else to_text(answer)
            if identity in names and identity not in answered:
                answered[identity] = (next(anchors), names[identity])
    return answered


def _call_fields(call: object) -> tuple[str, Any, str | None]:
    """Name, arguments and id of a call in any of the usual shapes."""
    if not isinstance(call, dict):
        return "tool call", call, None
    function = call.get("function")
    fields = function if isinstance(function, dict) else call
    name = fields.get("name", function if isinstance(function, str) else None)
    keys = ("arguments", "input", "args", "parameters")
    arguments = next((fields[key] for key in keys if key in fields), None)
    identity = call.get("id", call.get("tool_call_id"))
    if name is None and arguments is None:
        arguments = call
    return (
        "tool call" if name is None else to_text(name),
        arguments,
        None if identity is None else to_text(identity),
    )


def _broken_call(call: object) -> str:
    fields = call if isinstance(call, dict) else {"raw_text": call}
    why = escape(to_text(fields.get("error", "not parsed")))
    raw = mono(to_text(fields.get("raw_text", fields)))
    return f'<div class="tc"><b class="w">broken tool call</b><small>{why}</small>{raw}</div>'


def _reasoning(value: object) -> str:
    body = f"<p>{escape(value)}</p>" if isinstance(value, str) else mono(pretty(value))
    return block("reasoning", body, "d r")


def _image(part: dict[Any, Any]) -> str:
    found = next((part[key] for key in ("image_url", "image", "url", "source") if part.get(key)), None)
    if isinstance(found, dict):
        if found.get("type") == "base64":
            found = f"data:{to_text(found.get('media_type'))};base64,{to_text(found.get('data'))}"
        else:
            found = found.get("url", found)
    if not isinstance(found, str):
        return block("image part", mono(pretty(part)))
    if _SAFE_IMAGE.fullmatch(found):
        return f'<img alt="image"{attribute("src", found)}>'
    if len(found) > _LONG_URL:
        return block("image, not shown", mono(found))
    return f'<p class="k"><b class="w">image, not shown</b> {escape(found)}</p>'


def _chip(name: object, value: object) -> str:
    if not _is_short(value):
        return ""
    shown = json.dumps(value) if value is None or isinstance(value, bool) else to_text(value)
    return f"<small>{escape(to_text(name))} {escape(shown)}</small>"


def _other_fields(message: dict[Any, Any]) -> str:
    """Fields nobody named that are too long for a chip."""
    if message.keys() <= _SHOWN_FIELDS:
        return ""
    rest = {key: value for key, value in message.items() if key not in _SHOWN_FIELDS and not _is_short(value)}
    return block("other fields", mono(pretty(rest))) if rest else ""


def _is_short(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= _CHIP_LENGTH and "\n" not in value
    return value is None or isinstance(value, (bool, int, float))


def _kind(part: dict[Any, Any]) -> str | None:
    if "type" in part:
        return to_text(part["type"])
    return "text" if isinstance(part.get("text"), str) else None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a repeated key would vanish")
    return fields


def _listed(value: object) -> list[Any]:
    if value is None or value == "":
        return []
    return value if isinstance(value, list) else [value]
