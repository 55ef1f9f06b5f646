"""iterations.jsonl: one line per finished iteration and evaluation, written when its files are on the disk.

What is not named here is not complete: a resume moves such files aside. The line also says what became of
each rollout and how the step was made of them, so that the step can be computed again from the record alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

import msgspec

from rollbook.records.complete import FileFacts
from rollbook.records.jsonl import read_lines
from rollbook.records.record import Record, decode_record


class Fate(StrEnum):
    """What training did with a rollout."""

    TRAINED = "trained"
    CONSTANT = "constant"  # all rewards of its group were equal
    LONE = "lone"  # no other rollout of its group was left to compare it with
    SURPLUS = "surplus"  # sampled beyond what the batch needed
    TRUNCATED = "truncated"  # cut off, and left out for that
    DROPPED = "dropped"  # left out for another reason
    FAILED = "failed"


class RolloutFate(msgspec.Struct, array_like=True, frozen=True):
    """On the wire: [group_idx, traj_idx, fate, advantage]."""

    group_idx: int
    traj_idx: int
    fate: Fate
    advantage: float | None = None


class TrainRow(msgspec.Struct, array_like=True, frozen=True):
    """One row of training data. On the wire: [group_idx, traj_idx, part].

    `part` counts the token rows of a trajectory; it is 0 unless the conversation was rewritten on the way.
    """

    group_idx: int
    traj_idx: int
    part: int = 0


class ExampleDigest(msgspec.Struct, array_like=True, frozen=True):
    """A row as it was trained. On the wire: [group_idx, traj_idx, part, digest]."""

    group_idx: int
    traj_idx: int
    part: int
    digest: str  # 16 hex digits for its tokens and all that came with them


class Noise(msgspec.Struct, kw_only=True, frozen=True):
    """How far two ways of computing the same are apart where the run was trained.

    From it follows what a replay may differ by on another machine.
    """

    logprob: float  # the largest difference between two log-probabilities of a token
    gradient: float  # the norm of the difference of two gradients, as a part of the gradient's


class TrainStep(msgspec.Struct, kw_only=True):
    """One step of the optimiser; numbers at full precision."""

    micro_batches: list[list[TrainRow]]  # in the order of training
    processes: list[int] | None = None  # how many micro-batches each process took, where there are several
    learning_rate: float
    loss: float | None = None
    grad_norm: float | None = None
    applied: bool = True  # False: the gradient was not finite, and the step was skipped
    trained_tokens: int | None = None


class IterationRecord(Record, kw_only=True):
    """`files` and `error` are filled in by the run. An evaluation has neither rollout fates nor steps."""

    split: str
    iteration: int
    version: int | None = None  # training steps behind the weights that sampled
    rollouts: list[RolloutFate] | None = None
    examples: list[ExampleDigest] | None = None  # the rows that were trained, before they were dealt
    steps: list[TrainStep] | None = None
    weights_digest_before: str | None = None  # of the weights that sampled
    weights_digest: str | None = None  # after the last step
    frozen_digest: str | None = None  # of the weights that are not trained, where there are any
    machine: str | None = None  # what trained; equal words promise equal bits
    noise: Noise | None = None  # measured in the first and every tenth iteration
    processes: int | None = None
    timeouts: int | None = None  # with one of them, a run that is repeated need not be equal
    retries: int | None = None
    error: str | None = None  # its block was left by an exception; the files hold what there was
    files: dict[str, FileFacts] = {}


def read_iterations(path: Path, *, end: int | None = None) -> Iterator[IterationRecord]:
    """The records up to byte `end`; a missing file holds none."""
    if path.exists():
        for line in read_lines(path, end=end):
            yield decode_record(path, line, IterationRecord)
