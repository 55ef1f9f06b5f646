"""Two records of one iteration beside each other: what the run wrote, and what its replay would have."""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from rollbook.records.iterations import ExampleDigest, IterationRecord, Noise, TrainRow, TrainStep
from rollbook.rl.replay.findings import Findings, Place, Stage
from rollbook.rl.replay.seen_tokens import Row, SeenTokens

# A tolerance is so many times what the run measured: that was one other order of sums, and there are more.
_TIMES = 10
DIGESTS_ARE_EXACT = "the last bits may differ here, and a digest is of all bits"


class Promise(msgspec.Struct, kw_only=True):
    """What a replay of an iteration must be: equal to the bit, or near by as much as the run measured."""

    bits: bool
    why: str
    noise: Noise | None = None


class Slack(NamedTuple):
    """What numbers may differ by. All 0: nothing may."""

    logprob: float = 0.0
    gradient: float = 0.0  # as a part of it


def slack_of(promise: Promise, steps: int) -> Slack:
    """Each of the `steps` since the weights were equal moves them by a little more."""
    if promise.bits or promise.noise is None:
        return Slack()
    times = _TIMES * (1 + steps)
    return Slack(promise.noise.logprob * times, promise.noise.gradient * times)


def compare_records(
    recorded: IterationRecord,
    replayed: IterationRecord,
    found: Findings,
    *,
    seen: SeenTokens,
    slack: Slack,
) -> None:
    _compare_fates(recorded, replayed, found)
    _compare_examples(recorded, replayed, found, seen)
    pairs = recorded.steps or [], replayed.steps or []
    found.compare(Stage.BATCHES, "optimiser steps", len(pairs[0]), len(pairs[1]))
    found.compare(Stage.BATCHES, "processes", recorded.processes, replayed.processes)
    for number, (old, new) in enumerate(zip(*pairs, strict=False)):
        _compare_batches(old, new, found, number)
        near = slack.logprob * seen.slope[number] / (new.trained_tokens or 1)
        at = Place(optim_step=number)
        found.compare(Stage.LOSS, "loss", _number(old.loss), _number(new.loss), at, within=near)
        found.compare(Stage.LOSS, "whether it was applied", old.applied, new.applied, at)
        norms = _number(old.grad_norm), _number(new.grad_norm)
        near = slack.gradient * abs(norms[0] or 0.0)
        found.compare(Stage.GRAD_NORM, "gradient norm", *norms, at, within=near)
    if slack == Slack() or recorded.weights_digest == replayed.weights_digest:
        digests = recorded.weights_digest, replayed.weights_digest
        found.compare(Stage.WEIGHTS, "the digest of the new weights", *digests)
    else:
        found.leave_out(Stage.WEIGHTS, DIGESTS_ARE_EXACT)


def _compare_fates(recorded: IterationRecord, replayed: IterationRecord, found: Findings) -> None:
    old = {(fate.group_idx, fate.traj_idx): fate for fate in recorded.rollouts or ()}
    new = {(fate.group_idx, fate.traj_idx): fate for fate in replayed.rollouts or ()}
    for key in sorted(old.keys() & new.keys()):
        place = Place(*key)
        advantages = old[key].advantage, new[key].advantage
        found.compare(Stage.ADVANTAGES, "advantage", *advantages, place)
        found.compare(Stage.FATES, "fate", str(old[key].fate), str(new[key].fate), place)


def _compare_examples(
    recorded: IterationRecord, replayed: IterationRecord, found: Findings, seen: SeenTokens
) -> None:
    if recorded.examples is None:
        found.leave_out(Stage.EXAMPLES, "the record is older than their digests")
        return
    old = {TrainRow(*_key(one)): one.digest for one in recorded.examples}
    new = {TrainRow(*_key(one)): one.digest for one in replayed.examples or ()}
    is_named = found.differing(Stage.EXAMPLES) > 0  # the export has told the token
    for row in sorted(old.keys() | new.keys(), key=_key):
        place = Place(row.group_idx, row.traj_idx, row.part)
        digests = old.get(row), new.get(row)
        hint = None if is_named or digests[0] == digests[1] else _hint(row, seen)
        what = "the digest of what was trained"
        found.compare(Stage.EXAMPLES, what, *digests, place, hint=hint)


def _hint(row: TrainRow, seen: SeenTokens) -> str | None:
    """Where in a row to look first: what was sampled and what the trainer says should be close."""
    furthest = seen.furthest(Row(0, *_key(row)))
    if furthest is None:
        return None
    token, distance = furthest
    return f"its two log-probabilities are furthest apart at token {token}, by {distance:.3g}"


def _compare_batches(old: TrainStep, new: TrainStep, found: Findings, number: int) -> None:
    at = Place(optim_step=number)
    for name in ("learning_rate", "trained_tokens", "processes"):
        found.compare(Stage.BATCHES, name, getattr(old, name), getattr(new, name), at)
    found.compare(Stage.BATCHES, "micro-batches", len(old.micro_batches), len(new.micro_batches), at)
    for index, rows in enumerate(zip(old.micro_batches, new.micro_batches, strict=False)):
        ours, theirs = ([list(_key(row)) for row in side] for side in rows)
        at = Place(optim_step=number, micro_batch=index)
        found.compare(Stage.BATCHES, "rows [group, trajectory, part]", ours, theirs, at)


def _key(row: TrainRow | ExampleDigest) -> tuple[int, int, int]:
    return row.group_idx, row.traj_idx, row.part


def _number(value: float | None) -> float | None:
    """As the record has it, where a number that is not finite is null."""
    return value if value is not None and math.isfinite(value) else None
