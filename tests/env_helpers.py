"""Playing an episode in a test."""

from __future__ import annotations

import asyncio
from typing import Any

from rollbook.policies.conversion import to_chat
from rollbook.rollouts.types import Agent, Episode, FailureKind, Feedback, RolloutFailure, Task


def task_of(row: dict[str, Any], repeat: int = 0) -> Task:
    params = row["responses_create_params"]
    return Task(
        id=str(row.get("id", "t")),
        row=row,
        messages=to_chat(params["input"], params.get("instructions")),
        tools=params.get("tools") or [],
        params={key: value for key, value in params.items() if key not in ("input", "tools", "instructions")},
        repeat=repeat,
    )


def question(expected: Any = "42", **fields: Any) -> Task:
    row = {"id": "q", "responses_create_params": {"input": "What?"}, "expected_answer": expected, **fields}
    return task_of(row)


def run(agent: Agent, *tasks: Task) -> list[Episode]:
    async def play() -> list[Episode]:
        try:
            return list(await asyncio.gather(*map(agent.run, tasks)))
        finally:
            await agent.close()

    return asyncio.run(play())


def run_one(agent: Agent, task: Task) -> Episode:
    return run(agent, task)[0]


def failure_of(agent: Agent, task: Task) -> RolloutFailure:
    try:
        run_one(agent, task)
    except RolloutFailure as failure:
        return failure
    raise AssertionError("the rollout did not fail")


def grade(settings: dict[str, Any], answer: str, task: Task | None = None) -> Feedback:
    """What `dataset` makes of one answer."""
    from rollbook.envs.agents import build_agent

    agent = build_agent({"name": "dataset", **settings}, {"kind": "scripted", "script": [answer]})
    episode = run_one(agent, task or question())
    step = episode.turns[-1]
    assert step.reward == episode.reward
    return Feedback(reward=episode.reward, metrics=step.metrics, logs=step.logs)


def grade_failure(settings: dict[str, Any], answer: str, task: Task | None = None) -> RolloutFailure:
    from rollbook.envs.agents import build_agent

    agent = build_agent({"name": "dataset", **settings}, {"kind": "scripted", "script": [answer]})
    failure = failure_of(agent, task or question())
    assert failure.kind in (FailureKind.ENVIRONMENT, FailureKind.JUDGE)
    return failure
