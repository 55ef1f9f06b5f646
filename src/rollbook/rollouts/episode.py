"""`play`: one episode of an environment with a policy, turn by turn. The only such loop; RL, evals and
collections use it.

Whatever breaks in an environment or a policy is a RolloutFailure that names the function, the file and the
line, and carries the turns until then: they are paid for. Time that ran out is a failure of kind `timeout`,
never a reward of zero.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar
from weakref import WeakSet

from rollbook.records.identity import derive_seed
from rollbook.records.turns import NO_ROOM, Turn
from rollbook.rollouts.caller import caller_for
from rollbook.rollouts.failures import PolicyGone, error_with_place, is_cancellation, name_and_place
from rollbook.rollouts.types import (
    Completion,
    EnvironmentProtocol,
    Episode,
    FailureKind,
    Feedback,
    Message,
    Opening,
    OutOfTokens,
    Policy,
    Request,
    RolloutFailure,
    Task,
)
from rollbook.rollouts.usage import is_counted

_CLOSE_S = 30.0  # for an environment to clean up
_log = logging.getLogger("rollbook")
_warned_of: WeakSet[type[Any]] = WeakSet()  # environments whose close() failed
T = TypeVar("T")


async def play(
    environment: EnvironmentProtocol,
    policy: Policy,
    task: Task,
    *,
    max_turns: int = 64,
    timeout_s: float | None = None,
    call_timeout_s: float | None = None,
) -> Episode:
    """Play until the environment is done or `max_turns` are over, then close the environment.

    `timeout_s` limits the whole episode, `call_timeout_s` each call of the environment or the policy.
    """
    try:
        episode = await _Game(environment, policy, task, max_turns, call_timeout_s).play(timeout_s)
    except BaseException:
        with suppress(RolloutFailure):  # the first failure is the one that counts
            await call(environment.close, timeout_s=_CLOSE_S, kind=type(environment))
        raise
    try:
        await call(environment.close, timeout_s=_CLOSE_S, kind=type(environment))
    except RolloutFailure as failure:  # the result is there, and paid for
        _warn_once(type(environment), failure)
    return episode


class _Game:
    """One episode while it is played."""

    def __init__(
        self,
        environment: EnvironmentProtocol,
        policy: Policy,
        task: Task,
        max_turns: int,
        call_timeout_s: float | None,
    ) -> None:
        self._environment, self._policy, self._task = environment, policy, task
        self._max_turns, self._call_timeout_s = max_turns, call_timeout_s
        self._messages: list[Message] = []
        self._tokens: list[int] | None = []  # of the present row; None where a turn had none
        self._episode: Episode | None = None
        self._called = ""  # the function that is waited for

    async def play(self, timeout_s: float | None) -> Episode:
        try:
            async with time_limit(timeout_s, lambda: f"the episode, now in {self._called},"):
                return await self._play()
        except RolloutFailure as failure:
            failure.episode = self._episode
            raise
        except (TypeError, ValueError, AttributeError) as error:  # a Feedback of another shape than promised
            odd = RolloutFailure(FailureKind.ENVIRONMENT, f"{self._called}: {error_with_place(error)}")
            odd.episode = self._episode
            raise odd from error

    async def _play(self) -> Episode:
        opening: Opening = await self._call(self._environment.start, self._task, returns=Opening)
        prompt = self._given(opening.messages)
        episode = self._episode = Episode(prompt=prompt, tools=list(opening.tools))
        self._messages = list(prompt)
        for number in range(self._max_turns):
            completion = self._task.reply if number == 0 else None
            if completion is None:
                try:
                    completion = await self._call(self._policy.act, self._request(number), returns=Completion)
                except OutOfTokens:
                    if not episode.turns:
                        raise
                    episode.stop_reason = NO_ROOM
                    return episode
            turn = self._turn(completion)
            episode.turns.append(turn)  # before it is graded, which can fail
            episode.model, episode.stop_reason = completion.model, completion.finish_reason
            episode.response_id, episode.created_at = completion.id, completion.created_at
            feedback = await self._feedback(completion, number)
            turn.metrics = {**completion.metrics, **feedback.metrics}
            turn.logs = feedback.logs
            turn.messages += self._given(feedback.messages)
            self._messages += turn.messages
            turn.reward = self._number(feedback.reward)
            self._number(episode.reward)
            if feedback.done:
                episode.stop_reason = feedback.stop_reason or completion.finish_reason
                return episode
        episode.stop_reason = "max_turns"
        return episode

    def _request(self, number: int) -> Request:
        task, episode = self._task, self._episode
        assert episode is not None
        return Request(
            messages=tuple(self._messages),
            tools=episode.tools,
            params=task.params,
            turn=number,
            turns=tuple(episode.turns),
            seed=None if task.seed is None else derive_seed(task.seed, number),
        )

    async def _feedback(self, completion: Completion, number: int) -> Feedback:
        try:
            step = self._environment.step
            feedback: Feedback = await self._call(step, completion.message, returns=Feedback)
        except RolloutFailure as failure:
            stateless = getattr(self._environment, "stateless", False)
            if failure.kind is FailureKind.JUDGE and number == 0 and stateless:
                failure.reply = completion  # the judge failed; the reply only has to be graded
            raise
        return feedback

    def _turn(self, completion: Completion) -> Turn:
        new_tokens, new_row = self._new_tokens(completion)
        return Turn(
            messages=[completion.message],
            metrics=completion.metrics,
            prompt_token_ids=new_tokens,
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            temperature=completion.temperature,
            policy_version=completion.policy_version,
            finish_reason=completion.finish_reason,
            seed=completion.seed,
            new_row=new_row,
            usage=completion.usage if is_counted(completion.usage) else None,
        )

    def _new_tokens(self, completion: Completion) -> tuple[list[int] | None, str | None]:
        """The prompt's tokens since the last turn; or all of them, and why they begin a new row."""
        prompt, before, new_row = completion.prompt_token_ids, self._tokens, completion.new_row
        if prompt is None:
            self._tokens = None
            return None, new_row
        if new_row is None and before is None:
            new_row = "the turn before has no token ids"
        elif new_row is None and before is not None and prompt[: len(before)] != before:
            place = _first_difference(prompt, before)
            new_row = f"the prompt differs from the tokens of the turns before at token {place}"
        new = prompt if new_row is not None or before is None else prompt[len(before) :]
        self._tokens = None if completion.token_ids is None else [*prompt, *completion.token_ids]
        return new, new_row

    async def _call(self, function: Callable[..., Any], *arguments: Any, returns: type) -> Any:
        self._called = _name(function)
        environment = self._environment
        kind = type(environment) if getattr(function, "__self__", None) is environment else None
        return await call(function, *arguments, returns=returns, timeout_s=self._call_timeout_s, kind=kind)

    def _given(self, messages: Any) -> list[Message]:
        """The messages of an environment, which may have given anything."""
        if isinstance(messages, list | tuple) and all(isinstance(message, dict) for message in messages):
            return list(messages)
        expected = "a list of messages, each like {'role': 'user', 'content': '...'}"
        why = f"{self._called} gave the messages {messages!r:.100}; they must be {expected}"
        raise RolloutFailure(FailureKind.ENVIRONMENT, why)

    def _number(self, reward: Any) -> float:
        """A reward that can be summed and averaged; a torch scalar is one, a NaN is not."""
        with suppress(TypeError, ValueError):
            if math.isfinite(number := float(reward)):
                return number
        why = f"{_name(self._environment.step)} gave the reward {reward!r}, which is not a finite number"
        raise RolloutFailure(FailureKind.ENVIRONMENT, why)


def episode_played_elsewhere(
    prompt: list[Message], messages: Sequence[Message], reward: float, **fields: Any
) -> Episode:
    """An episode of which only messages and the whole reward are known; its turns have no finish reason."""
    turns: list[Turn] = []
    for message in messages:
        if not turns or message.get("role") == "assistant":
            turns.append(Turn(messages=[message], reward=0.0))
        else:
            turns[-1].messages.append(message)
    if turns:
        turns[-1].reward = reward
    return Episode(prompt=prompt, turns=turns, final_reward=0.0 if turns else reward, **fields)


async def call(
    function: Callable[..., Any],
    *arguments: Any,
    returns: type | None = None,
    timeout_s: float | None = None,
    kind: type[Any] | None = None,
) -> Any:
    """Call a method of an environment or a policy, sync or async; what it raises becomes a RolloutFailure.

    `kind` is the class of the environment whose code it runs. Nothing can interrupt what does not wait with
    `await`, so that is found to have taken too long once it returns.
    """
    began = time.monotonic()
    try:
        if (caller := caller_for(function, kind)) is None:
            result = function(*arguments)
        else:
            async with time_limit(timeout_s, lambda: _name(function)):
                result, raised = await caller.run(function, *arguments)
            if raised is not None:
                raise raised
        if (returns is None or not isinstance(result, returns)) and inspect.isawaitable(result):
            async with time_limit(timeout_s, lambda: _name(function)):
                result = await result
        elif timeout_s is not None and time.monotonic() - began > timeout_s:
            raise _timeout(_name(function), timeout_s)
    except (RolloutFailure, PolicyGone):
        raise
    except BaseException as error:
        if is_cancellation(error):
            raise
        why = f"{_name(function)}: {error_with_place(error)}"
        raise RolloutFailure(FailureKind.ENVIRONMENT, why) from error
    if returns is not None and not isinstance(result, returns):
        article = "an" if returns.__name__[0] in "AEIOU" else "a"
        what = f"{article} {returns.__name__}, not {type(result).__name__}"
        why = f"{name_and_place(function)} must return {what}"
        raise RolloutFailure(FailureKind.ENVIRONMENT, why)
    return result


@asynccontextmanager
async def time_limit(seconds: float | None, what: Callable[[], str]) -> AsyncIterator[None]:
    """Make what takes longer a RolloutFailure of kind `timeout`."""
    if seconds is None:
        yield
        return
    clock = asyncio.timeout(seconds)
    try:
        async with clock:
            yield
    except BaseException as error:
        # An error made of the cancellation by somebody's `except` is the time-out, too.
        if not clock.expired() or is_cancellation(error):
            raise
        raise _timeout(what(), seconds) from None


def _timeout(what: str, seconds: float) -> RolloutFailure:
    return RolloutFailure(FailureKind.TIMEOUT, f"{what} took longer than {seconds:g} s")


def _first_difference(one: list[int], other: list[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))


def _warn_once(kind: type[Any], failure: RolloutFailure) -> None:
    """One line: a million of them would say no more."""
    if kind not in _warned_of:
        _warned_of.add(kind)
        _log.warning("%s; the results are kept, and this is not said again", failure)


def _name(function: Callable[..., Any]) -> str:
    owner = getattr(function, "__self__", None)
    name = getattr(function, "__name__", type(function).__name__)
    return f"{type(owner).__name__}.{name}" if owner is not None else name
