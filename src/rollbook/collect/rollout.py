"""One rollout of a collection: an item becomes a finished line, or a failure with what is kept of it.

Both are made where the rollout runs, in this process or in a worker.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

import msgspec

from rollbook.collect.items import Answer, Failure, Item, Line
from rollbook.collect.rows import make_task, output_line, response_so_far
from rollbook.collect.settings import CollectSettings
from rollbook.envs.agents import build_agent
from rollbook.policies.registry import POLICIES
from rollbook.records.redact import redact_text
from rollbook.records.turns import Usage
from rollbook.rollouts.failures import PolicyGone, error_with_place, is_cancellation
from rollbook.rollouts.limits import spent_on_episode
from rollbook.rollouts.types import Agent, Episode, FailureKind, RolloutFailure, Task
from rollbook.rollouts.usage import clamp_tokens, known_usage
from rollbook.samplers.policy_kind import LOCAL

# What a row whose messages are of another shape than the API's can raise.
_OTHER_SHAPE = (TypeError, ValueError, AttributeError, msgspec.MsgspecError)

POLICIES["local"] = LOCAL  # which imports what policies/ may not


class Rollouts:
    """Rollouts in this process."""

    def __init__(self, agent: Agent, params: dict[str, Any] | None = None, *, add_seed: bool = False) -> None:
        """`params` are asked for in every row, over the row's own."""
        self._agent, self._params, self._add_seed = agent, params or {}, add_seed

    async def run(self, item: Item) -> Line:
        return (await self.answer(item)).result()

    async def answer(self, item: Item) -> Answer:
        """Whatever somebody's code raises is a failure of the item; only a policy that is gone raises."""
        task: Task | None = None
        episode: Episode | None = None
        try:
            task = self._task(item)
            episode = await self._agent.run(task)
            return Answer(item.row, item.repeat, line=_line(item, task, episode))
        except PolicyGone:
            raise
        except BaseException as error:
            # While rollouts run, Ctrl-C is a signal: a KeyboardInterrupt here is somebody's own.
            return Answer(item.row, item.repeat, failure=_failure(error, task, episode))

    async def close(self) -> None:
        await self._agent.close()

    def _task(self, item: Item) -> Task:
        try:
            return make_task(item, self._params, add_seed=self._add_seed)
        except _OTHER_SHAPE as error:
            why = f"the row cannot be turned into a request ({type(error).__name__}: {error})"
            raise RolloutFailure(FailureKind.INVALID_REQUEST, why) from error


def rollouts_here(settings: CollectSettings) -> Rollouts:
    agent = settings.agent
    built = build_agent(
        agent.env, agent.policy, max_turns=agent.max_turns, timeout_s=settings.rollout_timeout_s
    )
    return Rollouts(built, settings.responses_create_params, add_seed=settings.num_repeats_add_seed)


def _line(item: Item, task: Task, episode: Episode) -> Line:
    if episode.reward is None or not math.isfinite(episode.reward):
        raise ValueError(f"the reward is {episode.reward!r}, which is not a finite number")
    usage = None if episode.usage is None else _clamped(episode.usage)
    spent = spent_on_episode(episode)
    return Line(output_line(item, task, episode), float(episode.reward), usage, spent)


def _failure(error: BaseException, task: Task | None, episode: Episode | None) -> Failure:
    """What is kept of a failed rollout: its replies are paid for."""
    if isinstance(error, RolloutFailure):
        failure = Failure(error.kind, _redacted(error), error.status, error.retry_after, reply=error.reply)
        episode = error.episode or episode
    else:
        why = error_with_place(error)
        if isinstance(error, asyncio.CancelledError) and is_cancellation(error):
            why = "the rollout's task was cancelled by the environment's or the policy's own code"
        failure = Failure(FailureKind.ENVIRONMENT, _redacted(why))
    if episode is not None and task is not None:
        failure.response = response_so_far(task, episode)
        if failure.reply is None:
            failure.usage = _clamped(episode.counted or known_usage(episode.turns))
    return failure


def _clamped(usage: Usage) -> Usage:
    return Usage(*(clamp_tokens(getattr(usage, name)) for name in Usage.__struct_fields__))


def _redacted(what: object) -> str:
    """The text without secrets: an address may hold a password, and a server repeat a key that it refuses."""
    return redact_text(str(what).encode("utf-8", "replace").decode())
