"""A chat template with its tokenizer: messages become text, and text becomes tokens.

Text of a message never becomes a control token: a tool that answers `<|im_end|>` does not end the turn. Such
text is cut apart before it is encoded, so the model reads its characters. In what users and tools write this
also holds for marks such as `<tool_call>` and `<think>`, which a reply and a system prompt may contain.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import orjson

from rollbook.errors import RollbookError
from rollbook.policies.conversion import chat_tools

Message = dict[str, Any]

# Unicode keeps these for use inside a program; one that a conversation contains anyway is not taken.
_CUTS = [chr(number) for number in range(0xFDD0, 0xFDF0)]
# A template writes a few thousand characters of its own. One that writes millions would fill the memory.
_MOST_OF_ITS_OWN = 1_000_000
_LONGEST_TEMPLATE = 500_000  # the longest in use have some ten thousand
_MOST_OF_AN_ERROR = 300
_TAG = re.compile(r"[<\[|]\S*[>\]|]")
_OTHERS_WRITE = frozenset({"user", "tool"})


class TemplateError(RollbookError):
    """A chat template with which training or sampling would go wrong."""


class Protected(NamedTuple):
    """A conversation as the template gets it; `cut` is put inside text that looks like a control token."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    cut: str


class Encoded(NamedTuple):
    """Token ids, and the characters of the text that each one covers."""

    token_ids: list[int]
    starts: list[int]
    ends: list[int]


class ChatTemplate:
    """`template` replaces the tokenizer's own; the tokenizer has to be a fast one of transformers."""

    def __init__(self, tokenizer: Any, template: str | None = None) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise TemplateError(
                "this tokenizer has no fast version, which is needed to place tokens in the text; convert it "
                "to a tokenizer.json"
            )
        self.tokenizer = tokenizer
        self.source: Any = template or getattr(tokenizer, "chat_template", None)
        if (length := len(str(self.source or ""))) > _LONGEST_TEMPLATE:
            raise TemplateError(
                f"the chat template is {length:,} characters long, over the limit of {_LONGEST_TEMPLATE:,}; "
                "set model.chat_template to a file with another one"
            )
        added = tokenizer.added_tokens_decoder
        self.special_ids = frozenset(number for number, token in added.items() if token.special)
        self.id_of = {token.content: number for number, token in added.items()}
        special = [added[number].content for number in self.special_ids]
        self._controls = _any_of(special)
        self._marks = _any_of([*special, *filter(_TAG.fullmatch, self.id_of)])
        self._added = _any_of(self.id_of)

    def protect(self, messages: Iterable[Mapping[str, Any]], tools: Iterable[Any] = ()) -> Protected:
        change = with_objects if self._takes_objects else with_texts
        plain, chat = change(messages), chat_tools(tools)
        if not _has(self._marks, [plain, chat]):
            return Protected(plain, chat, "")
        cut = next((cut for cut in _CUTS if not _has(re.compile(cut), [plain, chat])), None)
        if cut is None:
            raise TemplateError("a conversation holds every one of the characters U+FDD0 to U+FDEF")
        kept = [
            _changed(message, self._cutter(message.get("role") in _OTHERS_WRITE, cut)) for message in plain
        ]
        return Protected(kept, _changed(chat, self._cutter(False, cut)), cut)

    def _cutter(self, from_others: bool, cut: str) -> Callable[[str], str]:
        pattern = self._marks if from_others else self._controls

        def apart(match: re.Match[str]) -> str:  # the rest may be a shorter control token
            return match[0][0] + cut + pattern.sub(apart, match[0][1:])

        return lambda text: pattern.sub(apart, text)

    def text(self, given: Protected, *, opening: bool = False, until: int | None = None) -> str:
        """The conversation, or its first messages, as text; with the `opening` of the next reply after it."""
        try:
            text = self.tokenizer.apply_chat_template(
                given.messages[:until],
                tools=given.tools or None,
                chat_template=self.source,
                tokenize=False,
                add_generation_prompt=opening,
            )
        except Exception as error:  # a template is a program of its author's and may raise anything
            if not self.source:
                raise TemplateError(
                    "the tokenizer has no chat template; set model.chat_template to a file with one"
                ) from None
            why = f"{type(error).__name__}: {error}"[:_MOST_OF_AN_ERROR]
            raise TemplateError(f"the chat template failed: {why}") from error
        self._refuse_endless(str(text), given)
        return str(text)

    @staticmethod
    def _refuse_endless(text: str, given: Protected) -> None:
        if len(text) <= _MOST_OF_ITS_OWN:
            return
        size = len(orjson.dumps([given.messages, given.tools], default=str))
        if len(text) > _MOST_OF_ITS_OWN + 4 * size:
            raise TemplateError(
                f"the chat template makes {len(text):,} characters of a conversation of about {size:,}; set "
                "model.chat_template to a file with another one"
            )

    def encode(self, text: str, cut: str = "") -> Encoded:
        """Tokens of rendered text. What the template itself writes becomes control tokens."""
        made = Encoded([], [], [])
        start = 0
        for piece in text.split(cut) if cut else [text]:
            found = self.tokenizer(piece, add_special_tokens=False, return_offsets_mapping=True)
            made.token_ids.extend(found["input_ids"])
            made.starts.extend(start + first for first, _ in found["offset_mapping"])
            made.ends.extend(start + last for _, last in found["offset_mapping"])
            start += len(piece) + len(cut)
        return made

    def encode_start(self, text: str, cut: str = "") -> Encoded:
        """The same at the beginning of a conversation, with the one BOS that the tokenizer puts there."""
        made = self.encode(text, cut)
        bos = self._own_bos
        if bos is None or made.token_ids[:1] == [bos]:
            return made
        return Encoded([bos, *made.token_ids], [0, *made.starts], [0, *made.ends])

    @cached_property
    def _own_bos(self) -> int | None:
        bos: int | None = self.tokenizer.bos_token_id
        return bos if bos is not None and self.tokenizer("x")["input_ids"][:1] == [bos] else None

    def opening_tokens(self, text: str) -> list[str]:
        """The added tokens that the text begins with; white space may stand between them."""
        found = []
        while match := self._added.match(text.lstrip()):
            found.append(match[0])
            text = text.lstrip()[match.end() :]
        return found

    def closing_token(self, text: str) -> str | None:
        """The token that the text ends with, if it is there once: `</tool_call>` is there for each call."""
        found = self._added.findall(text)
        closes = bool(found) and text.rstrip().endswith(found[-1]) and found.count(found[-1]) == 1
        return found[-1] if closes else None

    @cached_property
    def _takes_objects(self) -> bool:
        """Whether arguments of calls are written from objects; a few templates join them as text."""
        call = {"type": "function", "function": {"name": "look_up", "arguments": {"word": "one"}}}
        question = {"role": "user", "content": "What is it?"}
        given = Protected([question, {"role": "assistant", "content": "", "tool_calls": [call]}], [], "")
        try:
            return bool(self.text(given))
        except TemplateError:
            pass
        call["function"]["arguments"] = '{"word": "one"}'  # type: ignore[index]
        try:
            return not self.text(given)
        except TemplateError:  # it takes no calls at all
            return True


def with_objects(messages: Iterable[Mapping[str, Any]]) -> list[Message]:
    """Arguments of tool calls as objects, which chat templates write out; text in JSON would be quoted twice.

    Arguments that are no JSON object stay the text the model wrote.
    """

    def as_object(text: str) -> Any:
        value = read_object(text)
        return text if value is None else value

    return _with_arguments(messages, str, as_object)


def with_texts(messages: Iterable[Mapping[str, Any]]) -> list[Message]:
    """Arguments of tool calls as text in JSON."""
    return _with_arguments(messages, dict, lambda text: json.dumps(text, ensure_ascii=False))


def _with_arguments(
    messages: Iterable[Mapping[str, Any]], kind: type, change: Callable[[Any], Any]
) -> list[Message]:
    def changed(call: Any) -> Any:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), kind):
            return call
        return {**call, "function": {**function, "arguments": change(function["arguments"])}}

    made = [dict(message) for message in messages]
    for message in made:
        if message.get("tool_calls"):
            message["tool_calls"] = [changed(call) for call in message["tool_calls"]]
    return made


def read_object(text: str) -> dict[str, Any] | None:
    """A JSON object that can be written again; None for everything else."""
    try:
        value = json.loads(text)
        orjson.dumps(value)
    except (ValueError, TypeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """The longest of the texts that occurs; a single character can neither be cut nor missed."""
    known: Sequence[str] = sorted({text for text in texts if len(text) > 1}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, known)) if known else r"(?!)")


def _has(pattern: re.Pattern[str], value: Any) -> bool:
    if isinstance(value, str):
        return pattern.search(value) is not None
    if isinstance(value, Mapping):
        return any(_has(pattern, key) or _has(pattern, item) for key, item in value.items())
    return isinstance(value, list | tuple) and any(_has(pattern, item) for item in value)


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """The same value with every text in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_changed(key, change): _changed(item, change) for key, item in value.items()}
    return [_changed(item, change) for item in value] if isinstance(value, list | tuple) else value
