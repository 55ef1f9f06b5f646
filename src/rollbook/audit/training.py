"""What was trained of an iteration: every row of every trained rollout, as often as the config says, and on
which process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rollbook.audit.auditor import Auditor
from rollbook.audit.compare import Step, label
from rollbook.audit.places import NUMBERS, Bools, Ints
from rollbook.audit.result import Kind
from rollbook.audit.tables import Transcripts, keys_of, rollout_name
from rollbook.records.iterations import Fate, TrainStep


class TrainedRows(NamedTuple):
    """The rows of all steps of an iteration, in the order of training."""

    keys: Ints
    parts: Ints
    step: Ints
    micro_batch: Ints  # counted through all steps
    rank: Ints  # of each micro-batch

    @classmethod
    def of(cls, steps: Sequence[TrainStep]) -> TrainedRows:
        batches = [(number, batch) for number, step in enumerate(steps) for batch in step.micro_batches]
        rows = [row for _, batch in batches for row in batch]
        sizes = [len(batch) for _, batch in batches]
        ranks = [
            np.repeat(np.arange(len(step.processes)), step.processes)
            if step.processes and _add_up(step)
            else np.zeros(len(step.micro_batches), np.int64)
            for step in steps
        ]
        return cls(
            keys_of([row.group_idx for row in rows], [row.traj_idx for row in rows]),
            np.array([row.part for row in rows], np.int64),
            np.repeat(np.array([number for number, _ in batches], np.int64), sizes),
            np.repeat(np.arange(len(batches)), sizes),
            np.concatenate([*ranks, np.zeros(0, np.int64)]),
        )


def _add_up(step: TrainStep) -> bool:
    """Whether the processes took as many micro-batches as there are."""
    taken = step.processes
    return taken is None or (min(taken, default=0) >= 0 and sum(taken) == len(step.micro_batches))


class Trained(NamedTuple):
    """What an iteration's steps come to."""

    rows: TrainedRows
    flat: Ints  # where each row is among the parts of the transcripts; -1 where it is not
    tokens: int  # of one pass
    entropy_sampled: float | None  # of the first step


def audit_steps(
    auditor: Auditor,
    step: Step,
    file: Path,
    line: int,
    steps: Sequence[TrainStep],
    transcripts: Transcripts,
    places: Ints,
    missing: Ints,
    *,
    passes: int | None,
) -> Trained:
    """`places` has one value per rollout of the transcripts; `missing` are keys of those that it lacks, which
    is known; `passes` is how often each row is trained."""
    rows = TrainedRows.of(steps)
    flat = _places_of(rows, transcripts)
    places = np.where(_is_again(transcripts.keys), -1, places)
    is_missing = np.isin(rows.keys, missing) if len(missing) else np.zeros(len(rows.keys), np.bool_)
    for key in np.unique(rows.keys[(flat < 0) & ~is_missing]).tolist():
        auditor.find(
            Kind.DIFFERS,
            f"a step trains {rollout_name(key)}, of which no such row was sampled",
            file=file,
            line=line,
            key=label(step, key),
        )
    _audit_passes(auditor, step, file, line, flat, transcripts, places, passes)
    trained = np.where(flat < 0, 0, transcripts.trained[flat]) if len(transcripts.trained) else flat * 0
    sums = np.bincount(rows.step, weights=trained, minlength=len(steps)).astype(np.int64).tolist()
    for number, (recorded, found) in enumerate(zip(steps, sums, strict=True)):
        if is_missing[rows.step == number].any():
            continue  # its tokens are not known
        where = f"step {number} of iteration {step[1]}"
        if recorded.trained_tokens not in (None, found):
            auditor.find(
                Kind.DIFFERS,
                f"{where} says that it trained {recorded.trained_tokens} tokens; its rows have {found}",
                file=file,
                line=line,
            )
        if not _add_up(recorded):
            auditor.find(
                Kind.DIFFERS,
                f"{where} has {len(recorded.micro_batches)} micro-batches; "
                f"its processes took {recorded.processes}",
                file=file,
                line=line,
            )
        auditor.check("steps whose tokens are those of their rows", recorded.trained_tokens in (None, found))
    _add_ranks(auditor, rows, trained)
    is_trained = places == NUMBERS[Fate.TRAINED]
    once = np.repeat(is_trained, transcripts.parts)
    return Trained(rows, flat, int(transcripts.trained[once].sum()), _entropy(rows, flat, transcripts))


def _places_of(rows: TrainedRows, transcripts: Transcripts) -> Ints:
    """Where each trained row is among the parts of the transcripts, -1 where it is not."""
    if not len(transcripts):
        return np.full(len(rows.keys), -1)
    order = np.argsort(transcripts.keys, kind="stable")
    found = np.searchsorted(transcripts.keys[order], rows.keys)
    rollout = order[np.minimum(found, len(order) - 1)]
    is_there = (transcripts.keys[rollout] == rows.keys) & (rows.parts < transcripts.parts[rollout])
    return np.where(is_there, transcripts.first_part[rollout] + rows.parts, -1)


def _is_again(keys: Ints) -> Bools:
    """Which keys an earlier one is equal to."""
    order = np.argsort(keys, kind="stable")
    found = np.zeros(len(keys), np.bool_)
    found[order[1:]] = np.diff(keys[order]) == 0
    return found


def _audit_passes(
    auditor: Auditor,
    step: Step,
    file: Path,
    line: int,
    flat: Ints,
    transcripts: Transcripts,
    places: Ints,
    passes: int | None,
) -> None:
    """Every row of a trained rollout is in as many micro-batches as the others, no other row is in any."""
    counts = np.bincount(flat[flat >= 0], minlength=int(transcripts.parts.sum()))
    wanted = passes or max(1, int(counts.max(initial=1)))
    is_trained = np.repeat(places == NUMBERS[Fate.TRAINED], transcripts.parts)
    wrong = np.flatnonzero(counts != np.where(is_trained, wanted, 0))
    rollout_of = np.repeat(np.arange(len(transcripts)), transcripts.parts)
    for part in wrong.tolist():
        key = int(transcripts.keys[rollout_of[part]])
        fate = "is trained" if is_trained[part] else "is not trained"
        times = wanted if is_trained[part] else 0
        kind = Kind.MISSING if counts[part] < times else Kind.DOUBLED if times else Kind.DIFFERS
        auditor.find(
            kind,
            f"{rollout_name(key)} {fate} by its fate, and in {counts[part]} micro-batches, not {times}",
            file=file,
            line=line,
            key=label(step, key),
        )
    auditor.check("token rows that are trained as their fates say", len(counts) - len(wrong), len(counts))


def _add_ranks(auditor: Auditor, rows: TrainedRows, trained: Ints) -> None:
    rank_of_row = rows.rank[rows.micro_batch] if len(rows.rank) else rows.micro_batch
    for number in np.unique(rows.rank).tolist():
        share = auditor.rank(number)
        share.micro_batches += int((rows.rank == number).sum())
        share.rows += int((rank_of_row == number).sum())
        share.tokens += int(trained[rank_of_row == number].sum())


def _entropy(rows: TrainedRows, flat: Ints, transcripts: Transcripts) -> float | None:
    """The mean of -logprob over the tokens of the first step."""
    first = flat[(rows.step == 0) & (flat >= 0)]
    tokens = int(transcripts.trained[first].sum()) if len(first) else 0
    return float(-transcripts.logprobs[first].sum() / tokens) if tokens else None
