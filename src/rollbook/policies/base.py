"""What a policy is asked, what it answers, and how it can fail.

A policy gets chat messages and returns one assistant message with its bookkeeping. A failure is a
`RolloutFailure` of one of a few kinds; the kind decides whether, when and how often to try again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

if TYPE_CHECKING:
    from rollbook.envs.agent import Episode

Message = dict[str, Any]
MOST_TOKENS = 0x7FFFFFFF  # that anybody may claim: what the journal of a collection has room for


class FailureKind(StrEnum):
    """Why a rollout has no result. The order is that of the way a request takes."""

    CONNECT = "connect"  # nobody answered the phone
    TRANSPORT = "transport"  # the connection broke, or half a body came
    TIMEOUT = "timeout"
    RATE_LIMIT = "rate_limit"
    SERVER_ERROR = "server_error"
    INVALID_REQUEST = "invalid_request"  # the same request will fail again
    BAD_ANSWER = "bad_answer"  # 200, but not what the protocol says
    ENVIRONMENT = "environment"
    JUDGE = "judge"
    WORKER_LOST = "worker_lost"  # the process that held the rollout died


class RolloutFailure(Exception):
    """One attempt at a rollout that came to nothing."""

    def __init__(
        self, kind: FailureKind, message: str, *, status: int | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.kind, self.status, self.retry_after = kind, status, retry_after
        self.episode: Episode | None = None  # as far as it came
        self.reply: Completion | None = None  # which only has to be judged again


def is_for_the_task(error: BaseException) -> bool:
    """Whether it ends the task on somebody's order, and is not the doing of the code that it came from.

    Other people's code raises what is no Exception, too: a panic in Rust is none, nor is a CancelledError
    that leaked out of a library. Those are failures of a rollout like any other.
    """
    import asyncio  # not above: settings have kinds of failures in them, and need no event loop

    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is None or task.cancelling() > 0
    return isinstance(error, KeyboardInterrupt | GeneratorExit)


class Usage(msgspec.Struct):
    input_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int = 0

    @property
    def is_known(self) -> bool:
        """No request and answer are without a token: where none was counted, nobody counted."""
        return self.input_tokens > 0 or self.output_tokens > 0

    def add(self, other: Usage) -> None:
        self.input_tokens += other.input_tokens
        self.output_tokens += other.output_tokens
        self.reasoning_tokens += other.reasoning_tokens
        self.cached_tokens += other.cached_tokens


class Completion(msgspec.Struct):
    """One assistant message and what came with it."""

    message: Message  # role, content, reasoning_content?, tool_calls?
    finish_reason: str = "stop"
    usage: Usage = msgspec.field(default_factory=Usage)
    model: str | None = None
    id: str | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    logprobs: list[float] | None = None


class Request(msgspec.Struct):
    """What the policy is asked. `params` are the row's sampling parameters under their Responses names."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    params: Mapping[str, Any] = {}
    turn: int = 0  # of the episode; a prompt, too, may hold messages of an assistant


class Policy(Protocol):
    async def act(self, request: Request) -> Completion: ...

    async def close(self) -> None: ...
