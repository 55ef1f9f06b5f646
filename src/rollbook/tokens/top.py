"""The single tokens with the largest value of a measure, with the words around them."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

import msgspec
import numpy as np

from rollbook.records.tokens import TokenSequence
from rollbook.tokens.chunks import Array, Chunk, token_text

_BEFORE, _AFTER = 8, 4  # tokens of context


class TopToken(msgspec.Struct, kw_only=True):
    """A token, where it is, and what is known of it."""

    split: str
    iteration: int
    group_idx: int | None
    traj_idx: int | None
    part: int | None
    optim_step: int | None
    rank: int | None
    sequence_idx: int | None  # the record among those of its process and iteration
    token_idx: int
    step_idx: int | None
    task_id: str | None
    token_id: int
    text: str
    before: str
    after: str
    advantage: float | None = None
    inference_logprob: float | None = None
    trainer_logprob: float | None = None
    importance_ratio: float | None = None
    mismatch_kl: float | None = None  # None where it was not finite, too
    entropy: float | None = None
    masked: bool | None = None


class TopTokens:
    """The largest so far; a value that is not finite is larger than all others."""

    def __init__(self, most: int, measure: Callable[[Chunk], Array]) -> None:
        self._most, self._measure = most, measure
        self._heap: list[tuple[float, int, TopToken]] = []
        self._order = itertools.count(0, -1)  # of two equal ones the first stays

    def add(self, chunk: Chunk) -> None:
        value_N = self._measure(chunk)
        floor = self._heap[0][0] if len(self._heap) == self._most else -np.inf
        place_C = np.flatnonzero(value_N > floor)  # NaN is in no order: the measure makes it infinite
        largest = np.argsort(-value_N[place_C], kind="stable")[: self._most]
        for place in np.sort(place_C[largest]).tolist():
            entry = (float(value_N[place]), next(self._order), token_at(chunk, place))
            if len(self._heap) < self._most:
                heapq.heappush(self._heap, entry)
            else:
                heapq.heappushpop(self._heap, entry)

    def tokens(self) -> list[TopToken]:
        """The largest first."""
        return [token for _, _, token in sorted(self._heap, key=lambda entry: entry[:2], reverse=True)]


def mismatch_of(chunk: Chunk) -> Array:
    """The mismatch KL; infinite where it was not finite, and smaller than all where there is none."""
    kl_N = chunk.floats("mismatch_kl")
    missing_N = np.where(chunk.known("mismatch_kl"), np.inf, -np.inf)
    return np.where(np.isnan(kl_N), missing_N, kl_N).astype(np.float64)


def surprise_of(chunk: Chunk) -> Array:
    """-log of the probability: the trainer's, or where there is no trainer the sampler's."""
    trainer_N, sampled_N = chunk.floats("trainer_logprobs"), chunk.floats("inference_logprobs")
    logprob_N = np.where(chunk.has("trainer_logprobs"), trainer_N, sampled_N)
    known_N = chunk.known("trainer_logprobs") | chunk.known("inference_logprobs")
    missing_N = np.where(known_N, np.inf, -np.inf)
    return np.where(np.isnan(logprob_N), missing_N, -logprob_N).astype(np.float64)


def token_at(chunk: Chunk, place: int) -> TopToken:
    sequence, offset = chunk.sequences[chunk.sequence_N[place]], int(chunk.offset_N[place])
    return token_of(sequence, offset)


def token_of(sequence: TokenSequence, offset: int) -> TopToken:
    def value(name: str) -> float | None:
        column = sequence.get(name)
        return None if column is None or not np.isfinite(column[offset]) else float(column[offset])

    turn = int(sequence.turn_of[offset])
    masked = sequence.get("is_masked")
    size = len(sequence)
    return TopToken(
        split=sequence.split,
        iteration=sequence.iteration,
        group_idx=sequence.group_idx,
        traj_idx=sequence.traj_idx,
        part=sequence.part,
        optim_step=sequence.optim_step,
        rank=sequence.rank,
        sequence_idx=sequence.export_sequence_idx,
        token_idx=offset,
        step_idx=sequence.turns[turn].step_idx if turn >= 0 else None,
        task_id=sequence.task_id,
        token_id=int(sequence.token_ids[offset]),
        text=token_text(sequence, offset),
        before=_around(sequence, max(0, offset - _BEFORE), offset),
        after=_around(sequence, offset + 1, min(size, offset + 1 + _AFTER)),
        advantage=value("advantages"),
        inference_logprob=value("inference_logprobs"),
        trainer_logprob=value("trainer_logprobs"),
        importance_ratio=value("importance_ratio"),
        mismatch_kl=value("mismatch_kl"),
        entropy=value("entropy"),
        masked=None if masked is None else bool(masked[offset]),
    )


def _around(sequence: TokenSequence, start: int, end: int) -> str:
    separator = "" if sequence.pieces is not None else " "
    return separator.join(token_text(sequence, offset) for offset in range(start, end))
