"""What an episode is made of: tasks, requests, completions, failures; the protocols of both sides."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from rollbook.records.turns import Turn, Usage

Message = dict[str, Any]


class FailureKind(StrEnum):
    """Why a rollout has no result. The order is that of the way a request takes."""

    CONNECT = "connect"  # no answer to the connection attempt
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
    """One attempt at a rollout that produced no result."""

    def __init__(
        self, kind: FailureKind, message: str, *, status: int | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.kind, self.status, self.retry_after = kind, status, retry_after
        self.episode: Episode | None = None  # as far as it came
        self.reply: Completion | None = None  # a reply that only has to be graded again


class OutOfTokens(RolloutFailure):
    """A conversation has become too long for another reply. `play` ends the episode there."""

    def __init__(self, message: str) -> None:
        super().__init__(FailureKind.INVALID_REQUEST, message)


class Completion(msgspec.Struct):
    """One assistant message and what came with it. Token ids are those of the whole prompt."""

    message: Message  # role, content, reasoning_content?, tool_calls?
    finish_reason: str = "stop"
    usage: Usage | None = None  # None: nobody counted
    model: str | None = None
    id: str | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    temperature: float | None = None
    policy_version: int | None = None
    seed: int | None = None
    new_row: str | None = None  # why the prompt does not continue the tokens of the turns before
    metrics: dict[str, Any] = {}  # of the policy's own (format/tool_error); they join the turn's
    created_at: float | None = None  # by the server's clock


class Request(msgspec.Struct):
    """What the policy is asked. `params` are sampling parameters under their Responses names.

    `messages` is the whole conversation, a copy that is not changed later. A policy that knows tokens goes on
    from `turns`: the tokens so far stand there, and what is new are the messages after the last reply.
    """

    messages: tuple[Message, ...]
    tools: Sequence[Mapping[str, Any]] = ()
    params: Mapping[str, Any] = {}
    turn: int = 0
    turns: Sequence[Turn] = ()
    seed: int | None = None  # derived from the task's seed and the turn, never from the order of arrival


class Policy(Protocol):
    """Gives the replies. `act` raises RolloutFailure when there is none."""

    async def act(self, request: Request) -> Completion: ...

    async def close(self) -> None: ...


class Task(msgspec.Struct):
    """What an episode starts from: one row of the input, in chat form."""

    id: str
    row: dict[str, Any]  # the whole input row, with whatever the grader needs
    messages: list[Message]
    tools: list[dict[str, Any]] = []
    params: dict[str, Any] = {}  # sampling parameters, under their Responses names
    repeat: int = 0
    reply: Completion | None = None  # a reply of an earlier attempt that only has to be graded
    seed: int | None = None  # every turn's seed follows from it
    digest: str | None = None  # of what the row shows


class Opening(msgspec.Struct):
    """The first messages that the policy sees, and the tools it may call."""

    messages: list[Message]
    tools: list[dict[str, Any]] = []


class Feedback(msgspec.Struct):
    """What an environment makes of a reply. `messages` are shown to the policy unless `done`."""

    reward: float = 0.0
    done: bool = True
    messages: list[Message] = []
    metrics: dict[str, Any] = {}
    logs: dict[str, Any] = {}
    stop_reason: str | None = None  # why it is done, when it is not simply that the policy stopped


class EnvironmentProtocol(Protocol):
    """One episode of an environment. Each method may be async."""

    def start(self, task: Task) -> Opening | Awaitable[Opening]: ...

    def step(self, message: Message) -> Feedback | Awaitable[Feedback]: ...

    def close(self) -> Awaitable[None] | None: ...


class Episode(msgspec.Struct):
    """One rollout, finished or as far as it came."""

    prompt: list[Message]  # what the policy saw first
    tools: list[dict[str, Any]] = []
    turns: list[Turn] = []
    stop_reason: str = "stop"
    metrics: dict[str, Any] = {}
    final_reward: float = 0.0  # given to the whole episode, on top of the turns' rewards
    model: str | None = None
    response_id: str | None = None  # of the last completion, as is the next
    created_at: float | None = None
    counted: Usage | None = None  # of the whole, where the turns are not counted one by one
    response: dict[str, Any] | None = None  # given whole by systems that play episodes themselves
    fields: dict[str, Any] = {}  # further fields for the output row

    @property
    def reward(self) -> float | None:
        """The sum over the turns; None where a turn was not graded."""
        rewards = [turn.reward for turn in self.turns]
        if any(reward is None for reward in rewards):
            return None
        return self.final_reward + sum(float(reward or 0.0) for reward in rewards)

    @property
    def messages(self) -> list[Message]:
        """Everything after the prompt."""
        return [message for turn in self.turns for message in turn.messages]

    @property
    def usage(self) -> Usage | None:
        """The sum over the turns; None where one of them was not counted."""
        if self.counted is not None:
            return self.counted
        usages = [turn.usage for turn in self.turns]
        if not usages or any(usage is None for usage in usages):
            return None
        names = Usage.__struct_fields__
        return Usage(*(sum(getattr(usage, name) for usage in usages) for name in names))


class Agent(Protocol):
    """Turns a task into an episode: an environment and a policy, or a system that brings both."""

    async def run(self, task: Task) -> Episode: ...

    async def close(self) -> None: ...
