"""The tokens of a reply become a message again: its text, its reasoning and its tool calls.

transformers' own `parse_response` does it, with the response template that comes with the tokenizer, or with
one of the two here. Which one fits is tried at the start: replies that the chat template renders must come
back as they were. A call that cannot be read stays text, marks included, and is `broken`: nothing repairs it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import orjson

from rollbook.policies.chat_probes import PROBES, QUESTION, TOOL, call_id
from rollbook.policies.chat_template import ChatTemplate, Message, TemplateError
from rollbook.policies.conversion import chat_tools

# All keep white space: `read` knows which of it the template wrote. A pattern that begins with \s* would take
# quadratic time for a model that writes nothing but newlines.
_VERBATIM = {"strip": False}
_THOUGHT = {"open": "<think>", "close": "</think>", "content": "text"}
_CALL = {"type": "function", "function": "{content}"}
HERMES: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "\x00",  # the prefix is what the template wrote of the reply itself, and nothing before
    "fields": {
        "reasoning_content": _THOUGHT,
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": _CALL,
        },
        "content": {"content": "text", "content_args": _VERBATIM, "repeats": True},
    },
}
LLAMA3: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "\x00",
    "fields": {
        "tool_calls": {
            "open_pattern": r'\A(?:<\|python_tag\|>)?(?=\{"name": ?")',
            "content": "json",
            "repeats": True,
            "transform": _CALL,
        },
        "content": {"content": "text", "content_args": _VERBATIM, "repeats": True},
    },
}
PLAIN: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "\x00",
    "fields": {"content": {"content": "text", "content_args": _VERBATIM, "repeats": True}},
}
OURS = {"hermes": HERMES, "llama3": LLAMA3, "plain": PLAIN}
_PREFIX_TOKENS = 512  # the opening of a reply is at the end of the prompt


class ParsedReply(NamedTuple):
    """`broken`: there are marks of a tool call, and no call that can be read; the message holds its text."""

    message: Message
    broken: bool


class BrokenCall(ValueError):
    """A tool call that cannot be read."""


class ResponseTemplate:
    """One way to read replies: its name, and the declaration that transformers documents."""

    def __init__(self, name: str, spec: Any, tokenizer: Any) -> None:
        self.name, self.spec, self._tokenizer = name, spec, tokenizer
        self.is_ours = name in OURS
        self._call_marks = list(_literals(spec, "tool_calls"))

    @cached_property
    def _loaded(self) -> Any:
        return _load(self.spec)

    @cached_property
    def _plain(self) -> Any:
        return _load(PLAIN)

    def names(self, mark: str) -> bool:
        """Whether it looks for this mark; patterns escape the characters of marks."""
        fields = self.spec.get("fields", self.spec) if isinstance(self.spec, Mapping) else self.spec
        return mark in str(fields).replace("\\", "")

    def read(self, text: str, prefix: str, tools: list[dict[str, Any]], turn: int) -> Message:
        """The message; fails for a call that cannot be read. `prefix` is text of the prompt."""
        spec = self._plain if self.name == "llama3" and not tools else self._loaded
        # With tools it casts arguments to the types of the schema. JSON has types of its own.
        cast_by = None if self.is_ours else tools
        parsed = self._tokenizer.parse_response(text, spec, prefix=prefix, tools=cast_by)
        content = _joined(parsed.get("content", ""))
        if any(mark in content for mark in self._call_marks):
            raise BrokenCall("a mark of a call is there alone")
        calls = [_call(call, call_id(turn, number)) for number, call in enumerate(_calls(parsed))]
        if self.is_ours and "</think>" in prefix + text:
            content = content.lstrip()  # templates put empty lines behind a thought
        message: Message = {"role": "assistant", "content": content.strip() if calls else content}
        if thought := parsed.get("reasoning_content") or parsed.get("thinking"):
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = calls
        return message


def _load(spec: Any) -> Any:
    """The declaration with its patterns compiled: once, and not for every reply."""
    from transformers.utils.chat_parsing.response_templates import load_response_template

    return load_response_template(spec)


class ReplyParser:
    """`wanted` is a name of OURS or a response template of transformers; None looks for one that fits."""

    def __init__(
        self, template: ChatTemplate, stop_ids: frozenset[int], wanted: str | dict[str, Any] | None
    ) -> None:
        self._template, self._tokenizer, self._stop_ids = template, template.tokenizer, stop_ids
        self.opening = opening_of(template)
        start = self.opening.find("<think>")
        self._prefill = self.opening[start:] if start >= 0 else ""
        self.understands: list[str] = []  # the kinds of reply that come back as they were
        self._response = self._choose(wanted)
        # Special tokens are no text; those that the response template looks for are its marks.
        marks = {number for text, number in template.id_of.items() if self._response.names(text)}
        self._not_text = template.special_ids - marks

    @property
    def name(self) -> str:
        return self._response.name

    def parse(
        self,
        token_ids: Sequence[int],
        *,
        prompt_ids: Sequence[int] | None = None,
        tools: Sequence[Any] = (),
        turn: int = 0,
    ) -> ParsedReply:
        """The message that the sampled tokens are; calls get ids that are unique over the turns."""
        ids = list(token_ids)
        while ids and ids[-1] in self._stop_ids:
            ids.pop()
        text = self._decode([number for number in ids if number not in self._not_text])
        prefix = self._prefix(prompt_ids)
        try:
            return ParsedReply(self._response.read(text, prefix, chat_tools(tools), turn), False)
        except Exception:  # a regular expression, JSON, a schema: what a model wrote may fail in any of them
            return ParsedReply({"role": "assistant", "content": text}, True)

    def _prefix(self, prompt_ids: Sequence[int] | None) -> str:
        """What the template has written of the reply; others' response templates find it in the prompt."""
        if prompt_ids is None or (self._response.is_ours and not self._prefill):
            return self._begun(self.opening)
        return self._begun(self._decode(list(prompt_ids[-_PREFIX_TOKENS:])))

    def _begun(self, prompt: str) -> str:
        if not self._response.is_ours:
            return prompt
        return self._prefill if prompt.endswith(self._prefill) else ""

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _choose(self, wanted: str | dict[str, Any] | None) -> ResponseTemplate:
        """The first that gives back the most of the probes as the chat template renders them."""
        own = getattr(self._tokenizer, "response_template", None)
        specs: dict[str, Any] = dict(OURS) if own is None else {"the tokenizer's own": own, **OURS}
        if isinstance(wanted, str):
            if wanted not in OURS:
                raise TemplateError(f"unknown response template {wanted!r}; known: {', '.join(OURS)}")
            specs = {wanted: OURS[wanted]}
        elif wanted is not None:
            specs = {"given": wanted}
        best = None
        for name, spec in specs.items():
            self._response = ResponseTemplate(name, spec, self._tokenizer)
            understood = [kind for kind, message in PROBES.items() if self._comes_back(message)]
            if "text" in understood and len(understood) > len(self.understands):
                best, self.understands = self._response, understood
        if best is None:
            raise TemplateError(
                f"replies cannot be read: none of the response templates ({', '.join(specs)}) gives back a "
                "plain reply as the chat template renders it; give one that fits this tokenizer"
            )
        return best

    def _comes_back(self, message: Message) -> bool:
        stops = [self._decode([number]) for number in self._stop_ids]
        try:
            prompt, reply = rendered_reply(self._template, message, self.opening)
            until = min((place for stop in stops if (place := reply.find(stop)) >= 0), default=len(reply))
            parsed = self._response.read(reply[:until], self._begun(prompt), [TOOL], 0)
        except Exception:  # as in `parse`, or of the chat template
            return False
        return _same(parsed, message)


def opening_of(template: ChatTemplate) -> str:
    """What the chat template writes to open a reply; nothing where the question ends with it already."""
    question = template.protect([QUESTION])
    closed, opened = template.text(question), template.text(question, opening=True)
    return opened[len(closed) :] if opened.startswith(closed) else ""


def rendered_reply(template: ChatTemplate, message: Message, opening: str) -> tuple[str, str]:
    """A prompt, and what a model would have to write after it for the message."""
    given = template.protect([QUESTION, message], [TOOL])
    prompt, whole = template.text(given, until=1, opening=True), template.text(given)
    if not whole.startswith(prompt) and "<think>" in opening:  # a reply without a thought, opened with one
        prompt = prompt[: len(prompt) - len(opening) + opening.index("<think>")]
    if not whole.startswith(prompt):
        raise TemplateError("the chat template opens a reply otherwise than it renders one")
    return prompt, whole[len(prompt) :]


def _joined(content: Any) -> str:
    return "".join(content) if isinstance(content, list) else str(content)


def _calls(parsed: Mapping[str, Any]) -> list[Any]:
    calls = parsed.get("tool_calls") or []
    return calls if isinstance(calls, list) else [calls]


def _call(call: Any, name: str) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"] if "arguments" in function else function["parameters"]
    if not isinstance(function["name"], str) or not isinstance(arguments, dict):
        raise BrokenCall("a call is a name and an object of arguments")
    orjson.dumps(arguments)  # fails for what no record could hold, and the next line for NaN
    encoded = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return {"id": name, "type": "function", "function": {"name": function["name"], "arguments": encoded}}


def _literals(given: Any, field: str) -> Iterator[str]:
    """The marks of a field of a response template, where they are plain text."""
    spec = given.get("fields", {}).get(field, {}) if isinstance(given, Mapping) else {}
    for key in ("open", "close"):
        found = spec.get(key, [])
        yield from [found] if isinstance(found, str) else found


def _same(parsed: Message, message: Message) -> bool:
    def comparable(given: Message) -> tuple[Any, ...]:
        calls = [
            (call["function"]["name"], orjson.loads(_arguments(call)))
            for call in given.get("tool_calls") or ()
        ]
        return given["content"].strip(), given.get("reasoning_content"), calls

    return comparable(parsed) == comparable(message)


def _arguments(call: Mapping[str, Any]) -> str:
    arguments = call["function"]["arguments"]
    return arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
