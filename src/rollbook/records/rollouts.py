"""*_rollout_summaries.jsonl: one line a trajectory, with rewards, metrics and step-level numbers.

Every trajectory that was asked for leaves a line. One that failed has `status: "error"`, its `error`, and
no reward: a failure is never a zero. `group_idx` is the place of the problem in the batch and does not
shift when another group fails; `task_id` is the problem's own name and is the same in every iteration and
every run; (`run_id`, `split`, `iteration`, `group_idx`, `traj_idx`) joins with transcripts and logtree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, ClassVar, Self

import msgspec

from rollbook.records.plain import Plain, encode, to_plain
from rollbook.records.record import Record
from rollbook.records.redact import redact_text

SCHEMA_VERSION = 1
Message = Mapping[str, Any]  # role, content, and whatever else the chat format has


class Status(StrEnum):
    OK = "ok"
    ERROR = "error"


class Step(Record, kw_only=True):
    """One turn: what was seen, what was said, what it earned. The writer fills in `step_idx`."""

    REQUIRED: ClassVar[frozenset[str]] = frozenset({"reward"})

    step_idx: int = 0
    ob_len: int = 0
    ac_len: int = 0
    reward: float | None = 0.0
    episode_done: bool = False
    metrics: dict[str, Any] = {}
    logs: dict[str, Any] = {}


class Trajectory(msgspec.Struct, kw_only=True):
    """What a training loop hands over for one rollout; ids and totals are added when it is recorded."""

    steps: list[Step] = []
    messages: Sequence[Message] = ()
    final_reward: float = 0.0  # the part of the reward given to the whole episode, on top of the steps'
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
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        said = {"role": "assistant", "content": completion} if isinstance(completion, str) else completion
        step = Step(ob_len=ob_len, ac_len=ac_len, reward=reward, metrics=metrics or {}, logs=logs or {})
        return cls(steps=[step], messages=[*asked, said], stop_reason=stop_reason)

    def total_reward(self) -> float | None:
        """The sum; unknown when the reward of some step is."""
        if any(step.reward is None for step in self.steps):
            return None
        return float(self.final_reward) + sum(float(step.reward or 0.0) for step in self.steps)


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
    stop_reason: str | None = None
    error: str | None = None

    @classmethod
    def from_plain(cls, plain: dict[str, Plain]) -> Self:
        summary = super().from_plain(plain)
        summary.steps = [Step.from_plain(step) for step in plain.get("steps", ())]
        if summary.stop_reason is None:
            summary.stop_reason = _one_hot_stop_reason(summary.steps)
        return summary

    def to_plain(self) -> dict[str, Plain]:
        # Steps are flattened here rather than by the generic walk: they carry unknown keys of their own.
        steps, self.steps = self.steps, []
        try:
            plain = super().to_plain()
        finally:
            self.steps = steps
        nonfinite: list[str] = plain.pop("nonfinite", [])
        plain["steps"] = [_step_to_plain(step, index, nonfinite) for index, step in enumerate(steps)]
        if nonfinite:
            plain["nonfinite"] = nonfinite
        return plain

    @property
    def ac_len(self) -> int:
        return sum(step.ac_len for step in self.steps)


def summarize(trajectory: Trajectory, **ids: Any) -> RolloutSummary:
    """The line of a trajectory that came to its end."""
    return RolloutSummary(
        **ids,
        total_reward=trajectory.total_reward(),
        final_reward=float(trajectory.final_reward),
        **_rest(trajectory),
    )


def summarize_failure(error: BaseException | str, partial: Trajectory | None, **ids: Any) -> RolloutSummary:
    """The line of one that did not: no reward, but whatever it did until then."""
    rest = _rest(partial) if partial is not None else {}
    return RolloutSummary(**ids, status=Status.ERROR, error=describe_error(error), **rest)


def _rest(trajectory: Trajectory) -> dict[str, Any]:
    last = len(trajectory.steps) - 1
    return {
        "trajectory_metrics": trajectory.metrics,
        "steps": [_numbered(step, index, index == last) for index, step in enumerate(trajectory.steps)],
        "final_ob_len": int(trajectory.final_ob_len),
        "stop_reason": None if trajectory.stop_reason is None else str(trajectory.stop_reason),
        "extra": trajectory.extra,
    }


def _numbered(step: Step, index: int, is_last: bool) -> Step:
    """A copy, so that the loop may use its Step again; lengths are whole numbers on the disk."""
    lengths = {"ob_len": int(step.ob_len), "ac_len": int(step.ac_len)}
    return msgspec.structs.replace(step, step_idx=index, episode_done=is_last, **lengths)


def task_id_of(messages: Iterable[Message]) -> str:
    """A name for a problem that brought none: a hash of its prompt, the same in every run."""
    prompt = []
    for message in messages:
        if message.get("role") == "assistant":
            break
        prompt.append(to_plain({"role": message.get("role"), "content": message.get("content")}))
    return "sha256:" + hashlib.sha256(encode(prompt)).hexdigest()[:16]


def describe_error(error: BaseException | str) -> str:
    """One line for the record; a key that stands in an error message stays out of it."""
    if isinstance(error, str):
        return redact_text(error)
    text = str(error)
    return redact_text(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def _step_to_plain(step: Step, index: int, nonfinite: list[str]) -> dict[str, Plain]:
    plain = step.to_plain()
    nonfinite += [f"steps.{index}.{key}" for key in plain.pop("nonfinite", ())]
    return plain


def _one_hot_stop_reason(steps: list[Step]) -> str | None:
    """Tinker's loops say why a rollout stopped by a metric `stop/<reason>: 1.0` on the last step."""
    for key, value in (steps[-1].metrics if steps else {}).items():
        if key.startswith("stop/") and value:
            return key.removeprefix("stop/")
    return None
