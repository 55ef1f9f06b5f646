"""*_rollout_summaries.jsonl: one line per trajectory, with rewards, metrics and step-level numbers.

Every trajectory that was asked for leaves a line. One that failed has `status: "error"`, its `error`, and
no reward: a failure is never a zero. `group_idx` is the place of the problem in the batch and does not
shift when another group fails; `task_id` is the problem's own name and is the same in every iteration and
every run, `task_digest` is of the messages and tools that the policy was shown; (`run_id`, `split`,
`iteration`, `group_idx`, `traj_idx`) joins with transcripts and logtree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, ClassVar, Self

import msgspec

from rollbook.errors import UsageError
from rollbook.records.plain import Plain
from rollbook.records.record import Record
from rollbook.records.redact import redact_text
from rollbook.records.turns import Message, Turn, lengths_of

SCHEMA_VERSION = 1


class Status(StrEnum):
    OK = "ok"
    ERROR = "error"


class Step(Record, kw_only=True):
    """The numbers of one turn. The writer fills in `step_idx`; an unknown length is None."""

    REQUIRED: ClassVar[frozenset[str]] = frozenset({"reward", "ob_len", "ac_len"})

    step_idx: int = 0
    ob_len: int | None = 0  # tokens that the policy saw before this turn
    ac_len: int | None = 0  # tokens that it sampled
    reward: float | None = 0.0
    episode_done: bool = False
    metrics: dict[str, Any] = {}
    logs: dict[str, Any] = {}


class Trajectory(msgspec.Struct, kw_only=True):
    """What a training loop hands over for one rollout; ids and totals are added when it is recorded.

    `prompt` and `turns` say everything: messages and steps follow from them. A loop without turns gives
    `messages`, and `steps` with the numbers of its turns: their last replies are the steps', and what stands
    before is the prompt.
    """

    prompt: Sequence[Message] = ()
    turns: Sequence[Turn] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    steps: Sequence[Step] = ()
    messages: Sequence[Message] = ()
    final_reward: float | None = 0.0  # of the whole episode, on top of the turns'; None: unknown
    metrics: dict[str, Any] = {}
    stop_reason: str | None = None
    final_ob_len: int = 0
    extra: dict[str, Any] = {}  # further keys for the summary line

    @classmethod
    def single_turn(
        cls,
        prompt: str | Sequence[Message],
        completion: str | Message,
        reward: float,
        *,
        ob_len: int = 0,
        ac_len: int = 0,
        metrics: dict[str, Any] | None = None,
        logs: dict[str, Any] | None = None,
        stop_reason: str | None = None,
    ) -> Self:
        """A prompt, one answer, one reward: the usual case."""
        shown = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        reply = {"role": "assistant", "content": completion} if isinstance(completion, str) else completion
        step = Step(ob_len=ob_len, ac_len=ac_len, reward=reward, metrics=metrics or {}, logs=logs or {})
        return cls(prompt=shown, turns=[Turn(messages=[dict(reply)])], steps=[step], stop_reason=stop_reason)

    def total_reward(self) -> float | None:
        """The sum; unknown when a part of it is."""
        parts = [self.final_reward, *(part.reward for part in self.steps or self.turns)]
        if any(part is None for part in parts):
            return None
        return sum(float(part) for part in parts if part is not None)


class RolloutSummary(Record, kw_only=True):
    REQUIRED: ClassVar[frozenset[str]] = frozenset(
        {"sampling_client_step", "total_reward", "final_reward", "task_id"}
    )

    schema_version: int = SCHEMA_VERSION
    split: str
    iteration: int
    group_idx: int
    traj_idx: int
    tags: list[str] = []
    sampling_client_step: int | None = None
    total_reward: float | None = None
    final_reward: float | None = None
    trajectory_metrics: dict[str, Any] = {}
    steps: list[Step] = []
    final_ob_len: int = 0
    run_id: str | None = None
    task_id: str | None = None
    status: Status = Status.OK
    task_digest: str | None = None  # of what the policy was shown
    stop_reason: str | None = None
    error: str | None = None

    @classmethod
    def from_plain(cls, plain: dict[str, Plain]) -> Self:
        summary = super().from_plain(plain)
        summary.steps = [Step.from_plain(step) for step in plain.get("steps", ())]
        if summary.stop_reason is None:
            summary.stop_reason = _one_hot_stop_reason(summary.steps)
        return summary

    def content(self) -> dict[str, Any]:
        content = super().content()
        content["steps"] = [step.content() for step in self.steps]
        return content

    @property
    def ac_len(self) -> int | None:
        lengths = [step.ac_len for step in self.steps]
        return None if None in lengths else sum(length or 0 for length in lengths)


def summarize(trajectory: Trajectory, **ids: Any) -> RolloutSummary:
    """The line of a trajectory that came to its end."""
    final = trajectory.final_reward
    return RolloutSummary(
        **ids,
        total_reward=trajectory.total_reward(),
        final_reward=None if final is None else float(final),
        **_common_fields(trajectory),
    )


def summarize_failure(error: BaseException | str, partial: Trajectory | None, **ids: Any) -> RolloutSummary:
    """The line of one that did not: no reward, but whatever it did until then."""
    rest = _common_fields(partial) if partial is not None else {}
    return RolloutSummary(**ids, status=Status.ERROR, error=describe_error(error), **rest)


def _common_fields(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "trajectory_metrics": trajectory.metrics,
        "steps": _steps_of(trajectory),
        "final_ob_len": int(trajectory.final_ob_len),
        "stop_reason": None if trajectory.stop_reason is None else str(trajectory.stop_reason),
        "extra": trajectory.extra,
    }


def _steps_of(trajectory: Trajectory) -> list[Step]:
    """New steps, so that the loop may use its own again; lengths are whole numbers on the disk."""
    if trajectory.steps and trajectory.turns and len(trajectory.steps) != len(trajectory.turns):
        raise UsageError(f"{len(trajectory.steps)} steps for {len(trajectory.turns)} turns; leave steps out")
    parts: Sequence[Step | Turn] = trajectory.steps or trajectory.turns
    lengths = lengths_of(trajectory.turns) if not trajectory.steps else []
    last = len(parts) - 1
    steps = []
    for index, part in enumerate(parts):
        seen, sampled = (part.ob_len, part.ac_len) if isinstance(part, Step) else lengths[index]
        steps.append(
            Step(
                step_idx=index,
                ob_len=None if seen is None else int(seen),
                ac_len=None if sampled is None else int(sampled),
                reward=part.reward,
                episode_done=index == last,
                metrics=part.metrics,
                logs=part.logs,
                extra=part.extra if isinstance(part, Step) else {},
            )
        )
    return steps


def prompt_of(trajectory: Trajectory) -> Sequence[Message]:
    """All messages that the policy saw before its first turn."""
    if trajectory.prompt or trajectory.turns:
        return trajectory.prompt
    replies = reply_places(trajectory)
    return trajectory.messages[: replies[0]] if replies else trajectory.messages


def reply_places(trajectory: Trajectory) -> list[int]:
    """Where in `messages` the reply of each step is; replies before those belong to the prompt."""
    places = [at for at, message in enumerate(trajectory.messages) if message.get("role") == "assistant"]
    return places[-len(trajectory.steps) :] if trajectory.steps else places


def describe_error(error: BaseException | str) -> str:
    """One line for the record; a key in an error message is redacted."""
    if isinstance(error, str):
        return redact_text(error)
    text = str(error)
    return redact_text(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def _one_hot_stop_reason(steps: list[Step]) -> str | None:
    """Tinker's loops say why a rollout stopped by a metric `stop/<reason>: 1.0` on the last step."""
    for key, value in (steps[-1].metrics if steps else {}).items():
        if key.startswith("stop/") and value:
            return key.removeprefix("stop/")
    return None
