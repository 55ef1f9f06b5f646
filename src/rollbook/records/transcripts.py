"""*_transcripts.jsonl: the full conversation of every trajectory and every sampled token, one line each.

The ids are those of the summary line. Every message of a turn carries `step_idx`, the index of the step in
the summary that it belongs to; the messages before are the prompt. `turns` holds what is no text: the tokens
as they were sampled, from which a training step can be computed again.
"""

from __future__ import annotations

import math
from itertools import takewhile
from typing import Any, ClassVar

import msgspec

from rollbook.records.record import Record
from rollbook.records.rollouts import RolloutSummary, Status, Trajectory, reply_places
from rollbook.records.turns import Turn

_IN_SUMMARY = frozenset({"messages", "metrics", "logs"})  # or among the messages of the line
_TURN_FIELDS = tuple(name for name in Turn.__struct_fields__ if name not in _IN_SUMMARY)


class Transcript(Record, kw_only=True):
    REQUIRED: ClassVar[frozenset[str]] = frozenset({"total_reward", "task_id"})

    run_id: str | None = None
    split: str
    iteration: int
    group_idx: int
    traj_idx: int
    task_id: str | None = None
    task_digest: str | None = None
    status: Status = Status.OK
    total_reward: float | None = None
    stop_reason: str | None = None
    error: str | None = None
    tools: list[dict[str, Any]] | None = None
    messages: list[dict[str, Any]] = []
    turns: list[dict[str, Any]] | None = None  # the fields of Turn that are known, but for its messages

    def prompt(self) -> list[dict[str, Any]]:
        """What the policy saw first."""
        return list(takewhile(lambda message: message.get("step_idx") is None, self.messages))

    def to_turns(self) -> list[Turn]:
        """The turns as they were recorded, with their messages; metrics and logs are in the summary."""
        turns = []
        for fields in self.turns or []:
            step_idx = fields["step_idx"]
            messages = [
                {key: value for key, value in message.items() if key != "step_idx"}
                for message in self.messages
                if message.get("step_idx") == step_idx
            ]
            logprobs = fields.get("logprobs")
            if logprobs is not None:  # null: it was not finite
                logprobs = [math.nan if logprob is None else logprob for logprob in logprobs]
            turns.append(msgspec.convert({**fields, "messages": messages, "logprobs": logprobs}, Turn))
        return turns


def transcript_of(trajectory: Trajectory | None, summary: RolloutSummary) -> Transcript:
    tools = [dict(tool) for tool in trajectory.tools] if trajectory is not None else []
    turns = [_turn_fields(turn, index) for index, turn in enumerate(trajectory.turns)] if trajectory else []
    return Transcript(
        run_id=summary.run_id,
        split=summary.split,
        iteration=summary.iteration,
        group_idx=summary.group_idx,
        traj_idx=summary.traj_idx,
        task_id=summary.task_id,
        task_digest=summary.task_digest,
        status=summary.status,
        total_reward=summary.total_reward,
        stop_reason=summary.stop_reason,
        error=summary.error,
        tools=tools or None,
        messages=numbered_messages(trajectory) if trajectory is not None else [],
        turns=turns or None,
    )


def numbered_messages(trajectory: Trajectory) -> list[dict[str, Any]]:
    """The conversation, each message of a turn with its `step_idx`."""
    if trajectory.prompt or trajectory.turns:
        messages = [dict(message) for message in trajectory.prompt]
        for index, turn in enumerate(trajectory.turns):
            messages += [{**message, "step_idx": index} for message in turn.messages]
        return messages
    messages = [dict(message) for message in trajectory.messages]
    places = [*reply_places(trajectory), len(messages)]
    for index, place in enumerate(places[:-1]):
        for message in messages[place : places[index + 1]]:
            message.setdefault("step_idx", index)
    return messages


def _turn_fields(turn: Turn, step_idx: int) -> dict[str, Any]:
    fields: dict[str, Any] = {"step_idx": step_idx}
    for name in _TURN_FIELDS:
        value = getattr(turn, name)
        if value is not None:
            fields[name] = msgspec.structs.asdict(value) if name == "usage" else value
    return fields
