"""Which tokens of a conversation are learned: what the assistant said, up to the stop token.

The chat template is rendered, whole and up to each reply; what a reply adds is its span. That needs the
template to keep what it wrote: rendering more messages must only add text. One that rewrites earlier turns
(dropping old thoughts, say) would put the mask in the wrong place, so it is refused, or trained on the last
reply alone. So is one that leaves out a part of a message: a model would learn to answer with nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from rollbook.policies.chat_template import ChatTemplate, Encoded, Message, Protected, TemplateError
from rollbook.policies.conversion import text_of

Ids = np.ndarray[tuple[int], np.dtype[np.int32]]
Flags = np.ndarray[tuple[int], np.dtype[np.bool_]]


class Masked(NamedTuple):
    """A conversation as tokens, and which of them are learned."""

    tokens: Ids
    trained: Flags


class Span(NamedTuple):
    """Characters of the text that one reply covers."""

    start: int
    end: int


class ReplyMask:
    """`train_on` is assistant (every reply) or last; `may_drop` names parts that a template may leave out."""

    def __init__(
        self,
        template: ChatTemplate,
        stop_ids: frozenset[int],
        *,
        train_on: str = "assistant",
        may_drop: Collection[str] = (),
    ) -> None:
        self._template, self._stop_ids = template, stop_ids
        self._train_on, self._may_drop = train_on, frozenset(may_drop)
        self._drops: dict[Any, list[tuple[str, int]]] = {}
        self.dropped = 0  # parts that the template left out, as `may_drop` allows

    def masked(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> Masked:
        for number, message in enumerate(messages):
            if not isinstance(message["content"], str):  # a template would write out the list
                raise TemplateError(f"message {number + 1} has a part that is not text; leave that row out")
        given = self._template.protect(messages, tools)
        replies = self._replies(messages)
        text = self._template.text(given)
        spans = [self._span(given, place, text) for place in replies]
        self._refuse_dropped(given, replies)
        encoded = self._template.encode_start(text, given.cut)
        tokens = np.asarray(encoded.token_ids, dtype=np.int32)
        trained = np.zeros(len(tokens), dtype=np.bool_)
        for span in spans:
            trained[self._inside(span, encoded, text)] = True
        return Masked(tokens, trained)

    def _replies(self, messages: Sequence[Message]) -> list[int]:
        replies = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        if self._train_on == "last":
            replies = replies[-1:]
        return [place for place in replies if messages[place].get("weight", 1) != 0]  # a key of OpenAI's

    def _span(self, given: Protected, place: int, text: str) -> Span:
        count = len(given.messages)
        before = self._up_to_reply(given, place)
        after = text if place == count - 1 else self._template.text(given, until=place + 1)
        if not after.startswith(before):
            raise TemplateError(
                f"the chat template opens a reply with {before[-40:]!r}, and renders message {place + 1} "
                f"of {count} otherwise, so the model would not learn to go on from there; set "
                "model.chat_template to one that renders replies as it opens them"
            )
        if not text.startswith(after):
            raise TemplateError(
                f"the chat template renders message {place + 1} of {count} otherwise once more "
                "messages follow, so its tokens cannot be masked; set data.train_on: last, or "
                "model.chat_template to a template that keeps earlier turns"
            )
        return Span(len(before), len(after))

    def _up_to_reply(self, given: Protected, place: int) -> str:
        if place:
            return self._template.text(given, until=place, opening=True)
        # No template renders a conversation of no messages: see how it opens the next reply.
        first = self._template.text(given, until=1)
        opening = self._template.text(given, until=1, opening=True)[len(first) :]
        if not opening or opening not in first:
            raise TemplateError("the conversation begins with a reply, and where it begins cannot be seen")
        return first[: first.index(opening) + len(opening)]

    def _inside(self, span: Span, encoded: Encoded, text: str) -> Any:
        """The tokens of a reply, without what a template writes after the stop token."""
        starts, ends = np.asarray(encoded.starts), np.asarray(encoded.ends)
        inside = np.flatnonzero((starts >= span.start) & (ends <= span.end) & (ends > starts))
        stops = [place for place in inside if encoded.token_ids[place] in self._stop_ids]
        if stops and not text[ends[stops[-1]] : ends[inside[-1]]].strip():
            return inside[inside <= stops[-1]]  # a newline there is nobody's answer
        return inside

    def _refuse_dropped(self, given: Protected, replies: list[int]) -> None:
        trained = frozenset(replies)
        shape = _shape(given.messages, trained, bool(given.tools))
        if shape not in self._drops:
            self._drops[shape] = list(self._dropped(given, trained))
        for part, place in self._drops[shape]:
            if part not in self._may_drop:
                raise TemplateError(
                    f"the chat template leaves out the {part.replace('_', ' ')} of message {place + 1} of "
                    f"{len(given.messages)}, so the model would not learn it; set model.chat_template to one "
                    f"that renders it, or data.may_drop: [{part}] if that is meant"
                )
        self.dropped += len(self._drops[shape])

    def _dropped(self, given: Protected, trained: frozenset[int]) -> Iterator[tuple[str, int]]:
        """The same conversation with a word of its own in every part: which of them are not in the text?"""
        parts: dict[str, tuple[str, int]] = {}
        made: list[Message] = []
        for place, message in enumerate(given.messages):
            message, words = _with_words(message, place, place in trained)
            made.append(message)
            parts |= {word: (part, place) for word, part in words.items()}
        try:
            text = self._template.text(given._replace(messages=made))
        except TemplateError:  # it takes no words but certain ones: then nothing can be seen
            return
        yield from dict.fromkeys(found for word, found in parts.items() if word not in text)


def _shape(messages: Sequence[Message], trained: frozenset[int], has_tools: bool) -> Any:
    """What decides which parts a template renders; a dataset has few of these."""
    parts = tuple(
        (message["role"], place in trained, len(message.get("tool_calls") or ()), *_parts(message, True))
        for place, message in enumerate(messages)
    )
    return parts, has_tools


def _parts(message: Message, is_trained: bool) -> list[str]:
    """What has to be in the text. Thoughts and words of replies that are only context may go."""
    if message["role"] != "assistant":
        content = "tool_results" if message["role"] == "tool" else "content"
        return [content] if text_of(message).strip() else []
    parts = ["tool_calls"] if message.get("tool_calls") else []
    if is_trained and text_of(message).strip():
        parts.append("content")
    if is_trained and message.get("reasoning_content"):
        parts.append("reasoning")
    return parts


def _with_words(message: Message, place: int, is_trained: bool) -> tuple[Message, dict[str, str]]:
    """The message with words instead of what it says, and the part that each word stands for."""
    made, words = dict(message), dict[str, str]()
    for part in _parts(message, is_trained):
        if part == "tool_calls":
            names = [f"call-{number}-of-{place}." for number in range(len(message["tool_calls"]))]
            calls = zip(message["tool_calls"], names, strict=True)
            made["tool_calls"] = [_saying(call, word) for call, word in calls]
            words |= dict.fromkeys(names, part)
        else:
            word = f"{part.replace('_', '-')}-of-{place}."
            made["reasoning_content" if part == "reasoning" else "content"] = word
            words[word] = part
    return made, words


def _saying(call: Any, word: str) -> Any:
    """The call with its own name and id, which templates may check, and the word as its argument."""
    return {**call, "function": {**(call.get("function") or {}), "arguments": {"word": word}}}
