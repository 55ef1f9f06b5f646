"""What a chat template writes between a sampled reply and the next one, without the reply itself.

A small conversation with a stand-in for the reply is rendered, and what follows the stand-in's stop token is
the delta. Two ways find that place: behind a marker that the stand-in says, and where a render without the
new messages ends. Some templates drop what a reply says beside a call, others render a reply otherwise once
something follows, so one or the other may fail. Both are tried at the start for each kind of continuation;
where neither works, or they disagree, there is no delta.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from typing import Any, NamedTuple

from rollbook.policies.chat_probes import PROBES, QUESTION, TOOL, call_id, probe_word
from rollbook.policies.chat_template import ChatTemplate, Message, Protected, TemplateError

_MARKER = "REPLY-HERE"
_THOUGHT = "Let me see."
_WORDS = ("ANSWER-ONE", "ANSWER-TWO")


class NoDelta(Exception):
    """Why the tokens so far cannot be continued."""


class Kind(NamedTuple):
    """What decides how a template continues: who speaks next, and whether the reply had a thought."""

    follows: str  # user, tool, tools
    thought: bool

    def __str__(self) -> str:
        after = {"user": "a user's message", "tool": "a tool result", "tools": "parallel tool results"}
        return after[self.follows] + (" after a thought" if self.thought else "")


KINDS = [Kind(follows, thought) for thought in (False, True) for follows in ("user", "tool", "tools")]


class Deltas:
    """The deltas of one chat template; which way works for which kind is found out once, when first asked."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        eos = self._template.tokenizer.eos_token_id
        found = {self._template.id_of[text] for text in self._ends}
        return frozenset(found if eos is None else found | {eos})

    @cached_property
    def _ends(self) -> list[str]:
        """What the template writes at the end of a reply, first for one without calls."""
        closing = self._behind_reply_to(QUESTION)
        # Some write a further token where nothing follows, others close the text before they close the turn.
        going_on = zip(closing, self._behind_reply_to(QUESTION, QUESTION), strict=False)
        common = [one for one, other in takewhile(lambda pair: pair[0] == pair[1], going_on)]
        found = [*(common or closing[:1])[-1:], self._end_of_calls()]
        return list(dict.fromkeys(end for end in found if end))

    def _behind_reply_to(self, *messages: Message) -> list[str]:
        """The added tokens right behind a reply to the first message, with the others after it."""
        reply: Message = {"role": "assistant", "content": _MARKER}
        try:
            text = self._template.text(self._template.protect([messages[0], reply, *messages[1:]]))
        except TemplateError:
            return []
        return self._template.opening_tokens(text.partition(_MARKER)[2])

    def _end_of_calls(self) -> str | None:
        """Two calls tell the end of a reply from that of a call; some templates take only one."""
        for kind in ("parallel tool calls", "a tool call"):
            try:
                given = self._template.protect([QUESTION, PROBES[kind]], [TOOL])
                prompt, text = self._template.text(given, until=1), self._template.text(given)
            except TemplateError:
                continue
            reply = text[len(prompt) :] if text.startswith(prompt) else text
            return self._template.closing_token(reply) if probe_word(kind) in reply else None
        return None

    @cached_property
    def _ways(self) -> dict[Kind, str]:
        """The way to take for each kind; an empty one where there is none, and then `_reasons` has why."""
        self._reasons: dict[Kind, str] = {}
        ways = {}
        for kind in KINDS:
            try:
                ways[kind] = self._try_both(kind)
            except NoDelta as reason:
                ways[kind], self._reasons[kind] = "", str(reason)
        return ways

    def delta(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        stopped: bool,
        tools: Sequence[Any],
        reply: Mapping[str, Any] | None,
    ) -> list[int]:
        kind = _kind(messages, reply)
        if not self._ways[kind]:
            raise NoDelta(self._reasons[kind])
        text, cut = self._tail(kind, self._ways[kind], messages, tools, reply)
        ids = self._template.encode(text, cut).token_ids
        if not ids or ids[0] not in self.stop_ids:
            raise NoDelta("the stop token of the chat template is no token of the vocabulary")
        return ids[1:] if stopped else ids

    def _tail(
        self,
        kind: Kind,
        way: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any],
        reply: Mapping[str, Any] | None,
    ) -> tuple[str, str]:
        """The text from the stop token of the reply on, and what cuts apart the control tokens in it."""
        marker = _MARKER
        while any(marker in str(message) for message in messages) or marker in str(tools):
            marker += "-HERE"
        stand_in = _stand_in(kind, marker, messages, reply)
        if way == "difference" and "tool_calls" in stand_in:
            stand_in["content"] = ""  # some templates write it behind the results
        given = self._template.protect([QUESTION, stand_in, *messages], tools)
        try:
            whole = self._template.text(given, opening=True)
            if way == "marker":
                return whole[self._behind_marker(whole, marker) :], given.cut
            return whole[self._behind_reply(given, whole) :], given.cut
        except TemplateError as error:
            raise NoDelta(str(error)) from None

    def _behind_marker(self, whole: str, marker: str) -> int:
        if marker not in whole:
            raise NoDelta("the chat template leaves out an earlier reply")
        start = whole.index(marker)
        places = [place for end in self._ends if (place := whole.find(end, start)) >= 0]
        if not places:
            raise NoDelta("the chat template ends a reply with no token of its own")
        return min(places)

    def _behind_reply(self, given: Protected, whole: str) -> int:
        until_reply = self._template.text(given, until=2)
        if not whole.startswith(until_reply):
            raise NoDelta("the chat template renders a reply otherwise once messages follow")
        place = max((until_reply.rfind(end) for end in self._ends), default=-1)
        if place < 0 or len(self._template.text(given, until=1)) > place:
            raise NoDelta("the chat template ends a reply with no token of its own")
        return place

    def _try_both(self, kind: Kind) -> str:
        """The way that works for a probe; the marker if both do, for it renders once."""
        if not self._ends:
            raise NoDelta("the chat template ends a reply with no token of its own")
        messages, reply = _probe(kind)
        found: dict[str, str] = {}
        reasons = []
        for way in ("marker", "difference"):
            try:
                text, _ = self._tail(kind, way, messages, [TOOL], reply)
                found[way] = _complete(text, messages)
            except NoDelta as reason:
                reasons.append(str(reason))
        if not found:
            raise NoDelta(reasons[-1])
        if len(set(found.values())) > 1:
            raise NoDelta("what the chat template writes after a reply is not clear")
        return next(iter(found))

    def check(self) -> list[str]:
        """Lines that say where episodes continue in one row, and where and why they do not."""
        works = [str(kind) for kind in KINDS if self._ways[kind]]
        after = "" if len(works) == len(KINDS) else f" after {', '.join(works)}"
        lines = [f"episodes go on in one row{after}"] if works else []
        without: dict[str, list[str]] = {}
        for kind, reason in self._ways.items():
            if not reason:
                without.setdefault(self._reasons[kind], []).append(str(kind))
        return lines + [
            f"a new row begins after {', '.join(kinds)}: {reason}" for reason, kinds in without.items()
        ]


def _kind(messages: Sequence[Mapping[str, Any]], reply: Mapping[str, Any] | None) -> Kind:
    results = sum(message.get("role") == "tool" for message in messages)
    follows = "user" if not results else "tool" if results == 1 else "tools"
    return Kind(follows, bool(reply and reply.get("reasoning_content")))


def _stand_in(
    kind: Kind, marker: str, messages: Iterable[Mapping[str, Any]], reply: Mapping[str, Any] | None
) -> Message:
    """A reply that says the marker and makes the calls that the messages answer, with the names it had."""
    made: Message = {"role": "assistant", "content": marker}
    if kind.thought:
        made["reasoning_content"] = _THOUGHT
    names = {call.get("id"): call["function"]["name"] for call in (reply or {}).get("tool_calls") or ()}
    results = [message for message in messages if message.get("role") == "tool"]
    if results:
        made["tool_calls"] = [
            _empty_call(result, names.get(result.get("tool_call_id"))) for result in results
        ]
    return made


def _empty_call(result: Mapping[str, Any], name: str | None) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name or result.get("name") or "tool", "arguments": {}}
    return {"id": result.get("tool_call_id"), "type": "function", "function": function}


def _probe(kind: Kind) -> tuple[list[Message], Message]:
    if kind.follows == "user":
        messages: list[Message] = [{"role": "user", "content": _WORDS[0]}]
    else:
        words = _WORDS if kind.follows == "tools" else _WORDS[:1]
        messages = [
            {"role": "tool", "tool_call_id": call_id(0, number), "name": "look_up", "content": word}
            for number, word in enumerate(words)
        ]
    reply = PROBES["reasoning"] if kind.thought else PROBES["text"]
    return messages, reply


def _complete(text: str, messages: Sequence[Message]) -> str:
    """The text if it holds every message, in order."""
    place = 0
    for message in messages:
        place = text.find(message["content"], place)
        if place < 0:
            raise NoDelta(f"the chat template does not render a message of role {message['role']}")
    return text
