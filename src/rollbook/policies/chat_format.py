"""Tokens of a conversation: the prompt, what follows a sampled reply, a reply as a message, what SFT learns.

What was sampled is never rendered again: text does not survive that (tokens decode and encode to others, a
template drops old thoughts, arguments get other blanks). The next prompt is the tokens so far and the delta,
which is everything the template writes between the stop token of a reply and the opening of the next one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from typing import Any, Protocol

import numpy as np

from rollbook.policies.chat_deltas import Deltas, NoDelta
from rollbook.policies.chat_masks import Masked, ReplyMask
from rollbook.policies.chat_replies import ParsedReply, ReplyParser
from rollbook.policies.chat_template import ChatTemplate, Message


class Conversation(Protocol):
    """`messages` with `tools`, or for a model without a chat template `prompt` and `completion`."""

    @property
    def messages(self) -> list[Message]: ...

    @property
    def tools(self) -> list[dict[str, Any]]: ...

    @property
    def prompt(self) -> str | None: ...

    @property
    def completion(self) -> str | None: ...


class ChatFormat:
    """`response_template`: hermes, llama3, plain, or one as transformers documents it; else one that fits.

    `chat_template` replaces the tokenizer's. `train_on` (assistant or last) and `may_drop` are for `mask`.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        response_template: str | dict[str, Any] | None = None,
        chat_template: str | None = None,
        train_on: str = "assistant",
        may_drop: Collection[str] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer, chat_template)
        self.has_template = bool(self._template.source)
        self._deltas = Deltas(self._template)
        self._response_template = response_template
        self._parser: ReplyParser | None = None
        self._mask = ReplyMask(self._template, self.stop_ids, train_on=train_on, may_drop=may_drop)
        self._last_prompt: tuple[Any, list[int]] | None = None  # what was asked for, and its tokens
        self.why_no_delta: str | None = None  # what the last call of `delta` that gave None has to say

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a reply: those the chat template writes there, and the end of sequence."""
        return self._deltas.stop_ids

    @property
    def chat_template(self) -> Any:
        return self._template.source

    @property
    def dropped(self) -> int:
        """Parts of messages that the template left out of masked conversations, as `may_drop` allows."""
        return self._mask.dropped

    def prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()) -> list[int]:
        """The whole conversation with the opening of the next reply."""
        prompt = list(messages), list(tools)
        if self._last_prompt is None or self._last_prompt[0] != prompt:  # a group shares its prompt
            given = self._template.protect(messages, tools)
            made = self._template.encode_start(self._template.text(given, opening=True), given.cut)
            self._last_prompt = deepcopy(prompt), made.token_ids
        return list(self._last_prompt[1])

    def delta(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        stopped: bool,
        tools: Sequence[Any] = (),
        reply: Mapping[str, Any] | None = None,
    ) -> list[int] | None:
        """What follows the sampled tokens of `reply` when `messages` come and the next reply opens.

        `stopped`: the last sampled token is a stop token. Otherwise the delta begins with one. None where the
        template cannot be continued: the next prompt is a row of its own, and `why_no_delta` says why.
        """
        try:
            return self._deltas.delta(messages, stopped=stopped, tools=tools, reply=reply)
        except NoDelta as reason:
            self.why_no_delta = str(reason)
            return None

    def parse(
        self,
        token_ids: Sequence[int],
        *,
        prompt_ids: Sequence[int] | None = None,
        tools: Sequence[Any] = (),
        turn: int = 0,
    ) -> ParsedReply:
        """The message that sampled tokens are. `turn` makes the ids of its calls unique in the episode."""
        return self.parser.parse(token_ids, prompt_ids=prompt_ids, tools=tools, turn=turn)

    @property
    def parser(self) -> ReplyParser:
        if self._parser is None:  # SFT never asks for it
            self._parser = ReplyParser(self._template, self.stop_ids, self._response_template)
        return self._parser

    def mask(self, conversation: Conversation) -> Masked:
        """What SFT trains on: every reply with its stop token, or the completion of a plain prompt."""
        if conversation.completion is not None:
            return self._plain(str(conversation.prompt), conversation.completion)
        return self._mask.masked(conversation.messages, conversation.tools)

    def _plain(self, prompt: str, completion: str) -> Masked:
        first = self.tokenizer(prompt)["input_ids"]
        second = self.tokenizer(completion, add_special_tokens=False)["input_ids"]
        end = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        tokens = np.asarray([*first, *second, *end], dtype=np.int32)
        return Masked(tokens, np.arange(len(tokens)) >= len(first))

    def check(self) -> list[str]:
        """What was found out about the template, in sentences: what works, and what does not."""
        stops = ", ".join(repr(self.tokenizer.decode([number])) for number in sorted(self.stop_ids))
        parser = self.parser
        return [
            f"replies end in {stops or 'no token of their own'}",
            f"replies are read as {parser.name}: {', '.join(parser.understands)} come back as they were",
            *self._deltas.check(),
        ]
