"""Where an item is done: in this process. Other executors do the same elsewhere.

An executor takes an item and returns its outcome; whatever went wrong with a rollout, the death of the
process that held it included, is an outcome too.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import msgspec

from rollbook.collect.rows import Item, Outcome, make_task, output_line, response_so_far
from rollbook.collect.settings import CollectSettings
from rollbook.envs.agents import build_agent
from rollbook.policies.registry import POLICIES
from rollbook.records.redact import redact_text
from rollbook.records.turns import Usage
from rollbook.rollouts.failures import NotSent, PolicyGone, error_with_place, is_cancellation
from rollbook.rollouts.limits import ThrottledPolicy
from rollbook.rollouts.types import Agent, Episode, FailureKind, RolloutFailure, Task
from rollbook.rollouts.usage import clamp_tokens, known_usage
from rollbook.samplers.policy_kind import LOCAL

# What a row whose messages are of another shape than the API's can raise.
_OTHER_SHAPE = (TypeError, ValueError, AttributeError, msgspec.MsgspecError)


POLICIES["local"] = LOCAL  # which imports what policies/ may not


class Executor(Protocol):
    async def run(self, item: Item, *, alone: bool = False) -> Outcome:
        """`alone`: in a process that does nothing else meanwhile, where there are several."""

    def drain(self) -> None:
        """No further item will come; those of which nothing was sent yet come back as `not_sent`."""

    async def close(self) -> None: ...


class LocalExecutor:
    def __init__(
        self,
        agent: Agent,
        overrides: Mapping[str, Any],
        *,
        add_seed: bool,
        draining: asyncio.Event | None = None,
    ) -> None:
        self._agent = agent
        self._overrides = overrides
        self._add_seed = add_seed
        self._draining = draining or asyncio.Event()

    def drain(self) -> None:
        self._draining.set()

    async def run(self, item: Item, *, alone: bool = False) -> Outcome:
        started = time.monotonic()
        outcome = Outcome(item.row, item.repeat)
        episode: Episode | None = None
        try:
            task = self._task(item)
            episode = await self._agent.run(task)
            if episode.reward is None or not math.isfinite(episode.reward):
                raise ValueError(f"the reward is {episode.reward!r}, which is not a finite number")
            outcome.reward = float(episode.reward)
            outcome.line = output_line(item, task, episode)
            outcome.without_usage = (usage := episode.usage) is None
            _count(outcome, usage or Usage())
            outcome.stop_reason = _text(episode.stop_reason)
        except RolloutFailure as failure:
            outcome.failure, outcome.message = failure.kind, _said(failure)
            outcome.status, outcome.retry_after = failure.status, failure.retry_after
            outcome.reply = failure.reply
            if failure.episode is not None:
                _keep_replies(outcome, task, failure.episode)
        except NotSent:
            outcome.not_sent = True
        except PolicyGone:
            raise  # whatever is asked next would fail, too
        except BaseException as error:  # a bug in someone's code is that row's failure, not the run's
            # While rollouts run, Ctrl-C is heard by the loop: a KeyboardInterrupt here is somebody's own.
            if isinstance(error, asyncio.CancelledError) and is_cancellation(error):
                raise
            outcome = Outcome(item.row, item.repeat, failure=FailureKind.ENVIRONMENT)
            outcome.message = _said(error_with_place(error))
            if episode is not None:
                _keep_replies(outcome, task, episode)
        outcome.seconds = time.monotonic() - started
        return outcome

    def _task(self, item: Item) -> Task:
        try:
            return make_task(item, self._overrides, add_seed=self._add_seed)
        except _OTHER_SHAPE as error:
            why = f"the row makes no request ({type(error).__name__}: {error})"
            raise RolloutFailure(FailureKind.INVALID_REQUEST, why) from error

    async def close(self) -> None:
        await self._agent.close()


def cancelled_by_itself(item: Item) -> Outcome:
    """Of an item whose task was cancelled while those who run it want it to go on."""
    message = "the task of the rollout was cancelled by the environment's or the policy's own code"
    return Outcome(item.row, item.repeat, failure=FailureKind.ENVIRONMENT, message=message)


def _keep_replies(outcome: Outcome, task: Task, episode: Episode) -> None:
    """Of a rollout that failed after them: they are paid for."""
    outcome.response = response_so_far(task, episode)
    if outcome.reply is None:  # or they are not lost yet
        _count(outcome, episode.counted or known_usage(episode.turns))


def _count(outcome: Outcome, usage: Usage) -> None:
    outcome.input_tokens = clamp_tokens(usage.input_tokens)
    outcome.output_tokens = clamp_tokens(usage.output_tokens)


def _text(value: object) -> str:
    """Without half characters, which can neither be written nor sent to another process."""
    return str(value).encode("utf-8", "replace").decode()


def _said(what: object) -> str:
    """For files and people: an address may hold a password, and a server repeat a key that it refuses."""
    return redact_text(_text(what))


def local_executor(settings: CollectSettings, share: int = 1) -> LocalExecutor:
    """An executor of this process; `share` processes divide the limits a minute among them."""
    requests, tokens = settings.requests_per_minute, settings.tokens_per_minute
    agent, draining = settings.agent, asyncio.Event()
    limit = partial(
        ThrottledPolicy,
        requests_per_minute=requests / share if requests else None,
        tokens_per_minute=tokens / share if tokens else None,
        draining=draining,
        params=(agent.policy or {}).get("params"),
    )
    wrap = limit if requests or tokens else None
    built = build_agent(
        agent.env,
        agent.policy,
        max_turns=agent.max_turns,
        timeout_s=settings.rollout_timeout_s,
        wrap_policy=wrap,
    )
    return LocalExecutor(
        built,
        settings.responses_create_params,
        add_seed=settings.num_repeats_add_seed,
        draining=draining,
    )
