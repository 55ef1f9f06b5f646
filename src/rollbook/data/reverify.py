"""Grade stored responses again, without the model: another grader, or the same one mended.

Each stored reply is played to the environment as if the policy had just given it, turn by turn. That is only
fair to an environment whose grade depends on nothing but the task and the replies, which is what `stateless`
says; others are refused unless asked for. What the environment answered this time is compared with what it
answered then, and every change of reward is in the report. The old reward stays in the row (`reward_before`)
and so does what the old grading measured (`metrics_before`): the metrics that the row names in `_rb_metrics`,
what the new grading measures too, and the logs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from rollbook.data.job import DataJob
from rollbook.data.progress import NO_PROGRESS, Progress
from rollbook.data.rollouts import reward_of, stored_reply
from rollbook.envs.agents import EnvironmentAgent
from rollbook.envs.source import EnvironmentSource
from rollbook.errors import RollbookError, UsageError
from rollbook.policies.conversion import text_of, to_chat
from rollbook.records.datasets import DataManifest
from rollbook.records.identity import KEY, METRICS, STEPS, repeat_of, task_id
from rollbook.records.plain import encode_exactly
from rollbook.records.rows import Row
from rollbook.rollouts.types import Completion, Episode, FailureKind, Message, Request, RolloutFailure, Task

OLD_REWARD, OLD_METRICS, _ERROR = "reward_before", "metrics_before", "reverify_error"
_LOGS = "logs"
_NO_METRICS = frozenset({OLD_REWARD, OLD_METRICS, _ERROR, "reward", "response", "responses_create_params"})
_TOGETHER = 64  # rows graded at once: a judge answers over the network
_SAME = 1e-9


def reverify(
    inputs: Sequence[str | Path],
    output: Path,
    env: Mapping[str, Any],
    *,
    force: bool = False,
    pass_reward: float = 1.0,
    overwrite: bool = False,
    progress: Progress = NO_PROGRESS,
) -> DataManifest:
    """`env` is the environment of a config: its name and settings."""
    source = _grader(env, force)
    with DataJob(
        "reverify", inputs, output, arguments={"env": dict(env)}, overwrite=overwrite, progress=progress
    ) as job:
        changes = _Changes(pass_reward)
        asyncio.run(_grade_and_close(job, source, changes))
        job.manifest.details = changes.report()
        if changes.failed and changes.failed == job.rows_in:
            raise RollbookError(
                f"{output}: not made, for not one of {changes.failed} rows could be graded: "
                f"{'; '.join(changes.first_failures.values())}; mend that, or choose another grader"
            )
    return job.manifest


def _grader(env: Mapping[str, Any], force: bool) -> EnvironmentSource:
    source = EnvironmentSource(env)
    if not source.kind.stateless and not force:
        raise UsageError(
            f"env {source.name} does not say that it is stateless, so grading again may mean something else; "
            "set stateless = True on the class, or add --force"
        )
    return source.open()


async def _grade_and_close(job: DataJob, source: EnvironmentSource, changes: _Changes) -> None:
    try:
        await _grade_all(job, source, changes)
    finally:
        await source.close()  # a judge's connections


async def _grade_all(job: DataJob, source: EnvironmentSource, changes: _Changes) -> None:
    rows = job.rows()
    while batch := list(islice(rows, _TOGETHER)):
        graded = await asyncio.gather(*(_grade(row, source) for row in batch))
        for value, outcome in graded:
            if isinstance(outcome, RolloutFailure):
                # Nothing is dropped and nothing made up: the row keeps its reward and says why.
                job.count(f"failed_{outcome.kind}")
                value[_ERROR] = str(outcome)
                changes.fail(outcome)
            else:
                _take_over(value, outcome, job, changes)
            job.write(encode_exactly(value))


async def _grade(row: Row, source: EnvironmentSource) -> tuple[dict[str, Any], Episode | RolloutFailure]:
    value = row.value()
    value.pop(_ERROR, None)
    replies = _stored_replies(value)
    if not replies:
        return value, RolloutFailure(FailureKind.BAD_ANSWER, "the row holds no reply to grade")
    try:
        params = value["responses_create_params"]
        task = Task(
            id=task_id(value),
            row=value,
            messages=to_chat(params["input"], params.get("instructions")),
            tools=params.get("tools") or [],
            repeat=repeat_of(value) or 0,
        )
    except (KeyError, TypeError, AttributeError):
        raise row.error("has no responses_create_params.input, so there is nothing to grade") from None
    agent = EnvironmentAgent(source, _Replay(replies), max_turns=len(replies))
    try:
        return value, await agent.run(task)
    except RolloutFailure as failure:
        return value, failure


def _take_over(value: dict[str, Any], episode: Episode, job: DataJob, changes: _Changes) -> None:
    old = reward_of(value)
    told = [text_of(message) for message in stored_reply(value) if message["role"] != "assistant"]
    now = [text_of(message) for message in episode.messages if message.get("role") != "assistant"]
    if told[: len(now)] != now[: len(told)]:
        job.count("environment_answered_otherwise")
    changes.add(value.get(KEY), old, episode.reward)
    _replace_metrics(value, episode)
    value[OLD_REWARD] = old
    value["reward"] = episode.reward
    if isinstance(value.get(STEPS), list):
        value[STEPS] = _graded_again(value[STEPS], episode)


def _graded_again(steps: list[dict[str, Any]], episode: Episode) -> list[dict[str, Any]]:
    """The turns up to which it was played again, with what they earn now."""
    return [
        {**old, "reward": new.reward, "episode_done": new is episode.turns[-1], "metrics": new.metrics}
        for old, new in zip(steps, episode.turns, strict=False)
        if isinstance(old, dict)
    ]


def _replace_metrics(value: dict[str, Any], episode: Episode) -> None:
    """What the old grading measured must not look like a measurement of the new one."""
    named = value.get(METRICS)
    old_names = {_LOGS, *(named if isinstance(named, list) else ())} - _NO_METRICS
    new: dict[str, Any] = {}
    for turn in episode.turns:
        new |= {name: number for name, number in turn.metrics.items() if name not in _NO_METRICS}
    if logs := {str(number): turn.logs for number, turn in enumerate(episode.turns) if turn.logs}:
        new[_LOGS] = logs
    value.pop(OLD_METRICS, None)
    if before := {name: value.pop(name) for name in sorted((old_names | new.keys()) & value.keys())}:
        value[OLD_METRICS] = before
    value |= new
    value[METRICS] = [name for name in new if name != _LOGS]


class _Replay:
    """A policy that says again what was said."""

    def __init__(self, replies: Sequence[Message]) -> None:
        self._replies = iter(replies)

    async def act(self, request: Request) -> Completion:
        return Completion(message=next(self._replies))

    async def close(self) -> None:
        return None


def _stored_replies(value: Mapping[str, Any]) -> list[Message]:
    return [message for message in stored_reply(value) if message["role"] == "assistant"]


class _Changes:
    """What became of the rewards."""

    def __init__(self, pass_reward: float) -> None:
        self._pass = pass_reward
        self.failed = 0
        self.first_failures: dict[FailureKind, str] = {}
        self._same = self._up = self._down = self._new = 0
        self._now_pass = self._now_fail = 0
        self._before_sum = self._after_sum = 0.0
        self._compared = 0
        self._examples: list[dict[str, Any]] = []

    def fail(self, failure: RolloutFailure) -> None:
        self.failed += 1
        self.first_failures.setdefault(failure.kind, str(failure))

    def add(self, key: Any, old: float | None, new: float | None) -> None:
        if old is None or new is None:
            self._new += 1
            return
        self._compared += 1
        self._before_sum += old
        self._after_sum += new
        if abs(new - old) <= _SAME:
            self._same += 1
            return
        self._up += new > old
        self._down += new < old
        self._now_pass += old < self._pass <= new
        self._now_fail += new < self._pass <= old
        if len(self._examples) < 10:
            self._examples.append({"key": key, "before": old, "after": new})

    def report(self) -> dict[str, Any]:
        mean = self._compared or 1
        return {
            "unchanged": self._same,
            "raised": self._up,
            "lowered": self._down,
            "now_pass": self._now_pass,
            "now_fail": self._now_fail,
            "had_no_reward": self._new,
            "failed": self.failed,
            "compared": self._compared,
            "mean_before": self._before_sum / mean if self._compared else None,
            "mean_after": self._after_sum / mean if self._compared else None,
            "examples": self._examples,
        }
