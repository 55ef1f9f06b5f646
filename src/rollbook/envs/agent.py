"""An agent turns a task into an episode: an environment and a policy, or a system that brings both."""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakSet

import msgspec

from rollbook.envs.base import (
    Environment,
    EnvironmentFactory,
    Feedback,
    SharingFactory,
    Start,
    Task,
    what_and_where,
)
from rollbook.policies.base import (
    Completion,
    FailureKind,
    Message,
    Policy,
    Request,
    RolloutFailure,
    Usage,
    is_for_the_task,
)
from rollbook.records.rollouts import Step

_log = logging.getLogger("rollbook")
_warned_of: WeakSet[type[Environment]] = WeakSet()  # those whose close() raised


class Episode(msgspec.Struct):
    """One finished rollout."""

    reward: float
    messages: list[Message]  # what came after the prompt: replies, tool results, the environment's words
    prompt: list[Message]  # what the policy saw first
    steps: list[Step] = []
    metrics: dict[str, Any] = {}
    stop_reason: str = "stop"
    usage: Usage = msgspec.field(default_factory=Usage)
    model: str | None = None
    tools: list[dict[str, Any]] = []
    completions: list[Completion] = []  # one an assistant message, for token ids and logprobs
    response: dict[str, Any] | None = None  # given whole by systems that speak Responses themselves
    fields: dict[str, Any] = {}  # further fields for the output row


class Agent(Protocol):
    async def run(self, task: Task) -> Episode: ...

    async def close(self) -> None: ...


class EnvironmentAgent:
    """A policy acting in an environment, turn by turn, until it is done."""

    def __init__(self, make_environment: EnvironmentFactory, policy: Policy, *, max_turns: int = 64) -> None:
        self._make_environment = make_environment
        self._policy = policy
        self._max_turns = max_turns

    async def run(self, task: Task) -> Episode:
        environment: Environment = await _guarded(self._make_environment, returns=Environment)
        try:
            episode = await self._play(environment, task)
        except BaseException:
            with contextlib.suppress(RolloutFailure):  # the first failure is the one that counts
                await _guarded(environment.close)
            raise
        try:
            await _guarded(environment.close)
        except RolloutFailure as failure:  # the result is there, and paid for
            _warn_once(type(environment), failure)
        return episode

    async def close(self) -> None:
        await self._policy.close()
        if isinstance(self._make_environment, SharingFactory):
            await self._make_environment.close()

    async def _play(self, environment: Environment, task: Task) -> Episode:
        start: Start = await _guarded(environment.start, task, returns=Start)
        episode = Episode(reward=0.0, messages=[], prompt=list(start.messages), tools=start.tools)
        try:
            await self._take_turns(environment, task, start, episode)
        except RolloutFailure as failure:
            failure.episode = episode  # the replies until then are paid for all the same
            raise
        except BaseException as error:
            if not episode.messages or is_for_the_task(error):
                raise
            broken = RolloutFailure(FailureKind.ENVIRONMENT, what_and_where(error))
            broken.episode = episode
            raise broken from error
        episode.steps[-1].episode_done = True
        return episode

    async def _take_turns(self, environment: Environment, task: Task, start: Start, episode: Episode) -> None:
        conversation = list(start.messages)
        for turn in range(self._max_turns):
            completion = task.reply if turn == 0 else None
            if completion is None:
                completion = await self._policy.act(Request(conversation, start.tools, task.params, turn))
            self._note(episode, completion, turn)  # before it is graded, which can fail
            feedback = await self._graded(environment, completion, turn)
            reward = _number(feedback.reward, environment)
            step = episode.steps[-1]
            step.reward, step.metrics, step.logs = reward, feedback.metrics, feedback.logs
            episode.reward = _number(episode.reward + reward, environment)
            conversation += (completion.message, *feedback.messages)
            episode.messages += feedback.messages
            if feedback.done:
                episode.stop_reason = feedback.stop_reason or completion.finish_reason
                return
        episode.stop_reason = "max_turns"

    @staticmethod
    async def _graded(environment: Environment, completion: Completion, turn: int) -> Feedback:
        try:
            feedback: Feedback = await _guarded(environment.step, completion.message, returns=Feedback)
        except RolloutFailure as failure:
            if failure.kind is FailureKind.JUDGE and turn == 0 and environment.stateless:
                failure.reply = completion  # it was the judge that failed
            raise
        return feedback

    @staticmethod
    def _note(episode: Episode, completion: Completion, turn: int) -> None:
        usage = completion.usage
        episode.usage.add(usage)
        episode.model, episode.stop_reason = completion.model, completion.finish_reason
        episode.completions.append(completion)
        episode.messages.append(completion.message)
        episode.steps.append(Step(step_idx=turn, ob_len=usage.input_tokens, ac_len=usage.output_tokens))


def steps_of(messages: Sequence[Message], reward: float) -> list[Step]:
    """The steps of an episode that was played elsewhere: one a reply, the reward with the last."""
    turns = sum(message.get("role") == "assistant" for message in messages) or 1
    steps = [Step(step_idx=turn) for turn in range(turns)]
    steps[-1].reward, steps[-1].episode_done = reward, True
    return steps


def _warn_once(kind: type[Environment], failure: RolloutFailure) -> None:
    """A line for each of a million rollouts would say no more than the first."""
    if kind not in _warned_of:
        _warned_of.add(kind)
        _log.warning("%s; the results are kept, and this is not said again", failure)


async def _guarded(call: Any, *arguments: Any, returns: type | None = None) -> Any:
    """Call into an environment, sync or async; what it raises is its failure, not the policy's."""
    try:
        result = call(*arguments)
        if result is not None and not (returns and isinstance(result, returns)):  # asking costs a microsecond
            result = await result if inspect.isawaitable(result) else result
    except RolloutFailure:
        raise
    except BaseException as error:
        if is_for_the_task(error):
            raise
        raise RolloutFailure(FailureKind.ENVIRONMENT, f"{_place(call)}: {what_and_where(error)}") from error
    if returns is not None and not isinstance(result, returns):
        why = f"{_place(call)} must return a {returns.__name__}, not {type(result).__name__}"
        raise RolloutFailure(FailureKind.ENVIRONMENT, why)
    return result


def _number(reward: Any, environment: Environment) -> float:
    """A reward that can be summed and averaged; a torch scalar is one, a NaN is not."""
    try:
        if math.isfinite(number := float(reward)):
            return number
    except (TypeError, ValueError):
        pass
    why = f"{_place(environment.step)} gave the reward {reward!r}, which is not a finite number"
    raise RolloutFailure(FailureKind.ENVIRONMENT, why)


def _place(call: Any) -> str:
    owner = getattr(call, "__self__", None)
    return f"{type(owner).__name__}.{call.__name__}" if owner is not None else "making the environment"
