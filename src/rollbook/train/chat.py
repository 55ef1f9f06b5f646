"""A conversation as tokens, and which of them are learned: what the assistant said, up to the stop token.

The tokenizer's own chat template is rendered, whole and up to each reply; what a reply adds is its span. That
needs the template to keep what it wrote: rendering more messages must only add text. One that rewrites
earlier turns (dropping old thoughts, say) would put the mask in the wrong place, so it is refused, or trained
on the last reply alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from rollbook.errors import RollbookError
from rollbook.train.conversations import Conversation
from rollbook.train.packing import Sample


class TemplateError(RollbookError):
    """A chat template with which training would go wrong."""


class Span(NamedTuple):
    """Characters of the text that one reply covers."""

    start: int
    end: int


class ChatTokenizer:
    """`tokenizer` is a fast tokenizer of transformers; `train_on` is assistant (every reply) or last."""

    def __init__(self, tokenizer: Any, *, train_on: str = "assistant") -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise TemplateError(
                "this tokenizer has no fast version, which is needed to place the mask; convert it to "
                "a tokenizer.json"
            )
        self.tokenizer = tokenizer
        self._train_on = train_on
        self.stop_ids = _stop_ids(tokenizer)
        self.hides_reasoning = 0  # replies whose reasoning the template left out

    def sample(self, conversation: Conversation) -> Sample:
        if not conversation.is_chat:
            return self._plain(str(conversation.prompt), str(conversation.completion))
        text, spans = self.render(conversation)
        return self._masked(text, spans)

    def render(self, conversation: Conversation) -> tuple[str, list[Span]]:
        """The whole text, and where in it the replies to be learned stand."""
        messages, tools = conversation.messages, conversation.tools or None
        for number, message in enumerate(messages):
            if not isinstance(message["content"], str):  # a template would write out the list
                raise TemplateError(f"message {number + 1} has a part that is not text; leave that row out")
        text = self._text(messages, tools)
        replies = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        if self._train_on == "last":
            replies = replies[-1:]
        spans = []
        for place in replies:
            before = self._up_to_reply(messages, place, tools)
            after = text if place == len(messages) - 1 else self._text(messages[: place + 1], tools)
            if not after.startswith(before):
                raise TemplateError(
                    f"the chat template opens a reply with {before[-40:]!r}, and renders message {place + 1} "
                    f"of {len(messages)} otherwise, so the model would not learn to go on from there; set "
                    "model.chat_template to one that renders replies as it opens them"
                )
            if not text.startswith(after):
                raise TemplateError(
                    f"the chat template renders message {place + 1} of {len(messages)} otherwise once more "
                    "messages follow, so its tokens cannot be masked; set data.train_on: last, or "
                    "model.chat_template to a template that keeps earlier turns"
                )
            spans.append(Span(len(before), len(after)))
            thought = messages[place].get("reasoning_content")
            if thought and thought not in text:
                self.hides_reasoning += 1
        return text, spans

    def _up_to_reply(self, messages: list[dict[str, Any]], place: int, tools: Any) -> str:
        if place:
            return self._text(messages[:place], tools, opening=True)
        # No template renders a conversation of no messages: see how it opens the next reply.
        first = self._text(messages[:1], tools)
        opening = self._text(messages[:1], tools, opening=True)[len(first) :]
        if not opening or opening not in first:
            raise TemplateError("the conversation begins with a reply, and where it begins cannot be seen")
        return first[: first.index(opening) + len(opening)]

    def _masked(self, text: str, spans: list[Span]) -> Sample:
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        tokens = np.asarray(encoded["input_ids"], dtype=np.int32)
        starts = np.asarray([start for start, _ in encoded["offset_mapping"]], dtype=np.int64)
        ends = np.asarray([end for _, end in encoded["offset_mapping"]], dtype=np.int64)
        trained = np.zeros(len(tokens), dtype=np.bool_)
        for span in spans:
            inside = np.flatnonzero((starts >= span.start) & (ends <= span.end) & (ends > starts))
            trained[self._until_stop(tokens, inside, text, ends)] = True
        return Sample(tokens, trained)

    def _until_stop(self, tokens: Any, inside: Any, text: str, ends: Any) -> Any:
        """Without what a template writes after the stop token: a newline there is nobody's answer."""
        stops = [place for place in inside if int(tokens[place]) in self.stop_ids]
        if stops and len(inside) and not text[ends[stops[-1]] : ends[inside[-1]]].strip():
            return inside[inside <= stops[-1]]
        return inside

    def _plain(self, prompt: str, completion: str) -> Sample:
        first = self.tokenizer(prompt)["input_ids"]
        second = self.tokenizer(completion, add_special_tokens=False)["input_ids"]
        end = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        tokens = np.asarray([*first, *second, *end], dtype=np.int32)
        trained = np.arange(len(tokens)) >= len(first)
        return Sample(tokens, trained)

    def _text(self, messages: list[dict[str, Any]], tools: Any, *, opening: bool = False) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=opening
            )
        except Exception as error:  # a template is a program of its author's and may raise anything
            if not has_template(self.tokenizer):
                raise TemplateError(
                    "the tokenizer has no chat template; set model.chat_template to a file with one"
                ) from None
            raise TemplateError(f"the chat template failed: {type(error).__name__}: {error}") from error
        return str(text)


def has_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def _stop_ids(tokenizer: Any) -> frozenset[int]:
    """Tokens that can end a turn: the end of sequence, and every special token of the vocabulary."""
    added = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    eos = {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
    return frozenset(added | eos)
