"""What an audit says: a verdict, where everything is, what was compared, and what does not fit."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Verdict(StrEnum):
    BALANCED = "balanced"
    RUNNING = "running"  # not at its end yet, and its process lives
    INCOMPLETE = "incomplete"  # something is missing; what is there agrees
    UNBALANCED = "unbalanced"  # two files say different things, or one was changed
    UNREADABLE = "unreadable"


_EXIT_CODES = {Verdict.BALANCED: 0, Verdict.RUNNING: 3, Verdict.INCOMPLETE: 3}
_BAD = 1


class Kind(StrEnum):
    """What is wrong."""

    UNREADABLE = "unreadable"
    DIFFERS = "differs"
    DOUBLED = "doubled"
    FOREIGN = "foreign"  # of another run
    MISSING = "missing"


class Finding(msgspec.Struct, kw_only=True):
    """One thing that is wrong, where it is, and what to type next."""

    kind: Kind
    what: str
    file: str | None = None  # below the audited directory
    line: int | None = None
    key: str | None = None  # a rollout as split/iteration/group/rollout, a metric, a key of a collection
    next: str = ""
    more: int = 0  # further findings of this kind in this file, which are not listed


class Place(msgspec.Struct, kw_only=True):
    """Where rollouts ended up. Every rollout is in one place."""

    split: str  # train, eval, or collect
    name: str
    prompts: int = 0  # a prompt is where the best used of its rollouts is
    rollouts: int = 0
    turns: int = 0
    tokens: int = 0  # sampled
    tokens_mean: float | None = None  # per rollout whose length is known
    reward_mean: float | None = None
    reward_std_error: float | None = None


class RankShare(msgspec.Struct, kw_only=True):
    """What one process trained, and what of it is in the token export."""

    rank: int
    micro_batches: int = 0
    rows: int = 0
    tokens: int = 0  # trained
    exported: int | None = None  # records


class Check(msgspec.Struct, kw_only=True):
    """How much was compared. `unknown` could not be, and counts for nothing."""

    name: str
    agreed: int = 0
    compared: int = 0
    unknown: int = 0


class Comparison(msgspec.Struct, kw_only=True):
    """What is missing or was left out, beside what is there."""

    name: str
    rollouts: int
    basis: str  # what their length is known from
    tokens: float | None = None  # mean of these
    other_tokens: float | None = None  # and of the others
    tokens_z: float | None = None  # the difference in standard errors
    reward: float | None = None
    other_reward: float | None = None
    reward_z: float | None = None
    says: str = ""


class Audit(msgspec.Struct, kw_only=True):
    path: str
    kind: str  # rl, sft, collect, tinker, ...
    id: str | None = None
    verdict: Verdict = Verdict.BALANCED
    done: int = 0  # iterations, steps, or rollouts of a collection
    expected: int | None = None
    unit: str = "iterations"
    findings: list[Finding] = []
    places: list[Place] = []
    ranks: list[RankShare] = []
    checks: list[Check] = []
    comparisons: list[Comparison] = []
    notes: list[str] = []  # facts beside the verdict
    unanswered: list[str] = []  # what these files cannot say
    bytes_read: int = 0

    @property
    def exit_code(self) -> int:
        """0 balanced, 3 missing or running, 1 anything that does not agree or cannot be read."""
        return _EXIT_CODES.get(self.verdict, _BAD)


def verdict_of(findings: list[Finding], *, is_running: bool) -> Verdict:
    kinds = {finding.kind for finding in findings}
    if Kind.UNREADABLE in kinds:
        return Verdict.UNREADABLE
    if kinds - {Kind.MISSING}:
        return Verdict.UNBALANCED
    if kinds:
        return Verdict.INCOMPLETE
    return Verdict.RUNNING if is_running else Verdict.BALANCED
