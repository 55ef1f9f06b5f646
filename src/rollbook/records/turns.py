"""One turn of an episode: its messages and its tokens, from the moment it is sampled to the trainer's batch.

The same object is made when the policy answers, graded by the environment, written to `*_transcripts.jsonl`
and packed into a training batch. It owns its messages and its token ids, so nothing is ever matched up by
counting messages or tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

Message = Mapping[str, Any]  # role, content, and whatever else the chat format has


class Usage(msgspec.Struct):
    """Token counts as a server reports them. `Turn.usage` is None where nobody counted."""

    input_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int = 0


class Turn(msgspec.Struct, kw_only=True):
    """What the policy said once, and what the environment made of it.

    `prompt_token_ids` are the tokens that are new since the last turn; with `new_row` set they are the whole
    prompt again, because the tokens before cannot be continued, and `new_row` says why.
    """

    messages: list[dict[str, Any]]  # new in this turn: the reply, then what the environment answered
    reward: float | None = None  # None: not graded, or not known
    metrics: dict[str, Any] = {}
    logs: dict[str, Any] = {}
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None  # sampled, the stop token included
    logprobs: list[float] | None = None  # of the sampled tokens, at `temperature`
    temperature: float | None = None
    policy_version: int | None = None  # the number of training steps behind the weights that sampled
    finish_reason: str | None = None  # stop, length, tool_calls, ...
    seed: int | None = None
    new_row: str | None = None
    usage: Usage | None = None

    @property
    def reply(self) -> dict[str, Any]:
        return self.messages[0]


class Counts(Protocol):
    """What a turn says about the number of its tokens."""

    @property
    def prompt_token_ids(self) -> Sequence[int] | None: ...
    @property
    def token_ids(self) -> Sequence[int] | None: ...
    @property
    def new_row(self) -> str | None: ...
    @property
    def usage(self) -> Usage | None: ...


def lengths_of(turns: Sequence[Counts]) -> list[tuple[int | None, int | None]]:
    """For each turn, how many tokens the policy saw and how many it sampled; None where unknown."""
    lengths: list[tuple[int | None, int | None]] = []
    before: int | None = 0  # tokens of the row so far
    for turn in turns:
        seen = None if turn.usage is None else turn.usage.input_tokens
        sampled = None if turn.usage is None else turn.usage.output_tokens
        if turn.new_row is not None:
            before = 0
        if turn.prompt_token_ids is not None and before is not None:
            seen = before + len(turn.prompt_token_ids)
        if turn.token_ids is not None:
            sampled = len(turn.token_ids)
        is_counted = turn.prompt_token_ids is not None and turn.token_ids is not None
        before = seen + sampled if is_counted and seen is not None and sampled is not None else None
        lengths.append((seen, sampled))
    return lengths


class Tokens(Protocol):
    """What a turn says about its tokens."""

    @property
    def prompt_token_ids(self) -> list[int] | None: ...
    @property
    def token_ids(self) -> list[int] | None: ...
    @property
    def new_row(self) -> str | None: ...


class TokenRow(NamedTuple):
    """A run of turns whose tokens continue each other: one row of training data."""

    token_ids: list[int]
    sampled: list[bool]
    turns: list[tuple[int, int, int]]  # (index of the turn, start, end) of the sampled tokens in the row


def token_rows(turns: Sequence[Tokens]) -> list[TokenRow]:
    """The tokens of an episode, a new row wherever a turn could not continue the one before."""
    rows: list[TokenRow] = []
    for index, turn in enumerate(turns):
        if turn.token_ids is None or turn.prompt_token_ids is None:
            raise ValueError(f"turn {index} has no token ids")
        if not rows or turn.new_row is not None:
            rows.append(TokenRow([], [], []))
        row = rows[-1]
        row.token_ids.extend(turn.prompt_token_ids)
        row.sampled.extend([False] * len(turn.prompt_token_ids))
        start = len(row.token_ids)
        row.token_ids.extend(turn.token_ids)
        row.sampled.extend([True] * len(turn.token_ids))
        row.turns.append((index, start, len(row.token_ids)))
    return rows
