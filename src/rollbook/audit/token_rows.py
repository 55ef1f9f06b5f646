"""What the turns of transcripts say of the rows that a loss sees: how many tokens, which, and how likely.

A rollout has one token row, and one more wherever its history was rewritten; rows are called parts. Turns are
taken apart into columns over all turns of a file: a loop over them would take most of an audit's time.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from rollbook.audit.places import Bools, Floats, Ints
from rollbook.records.turns import Usage, lengths_of, token_rows

UNKNOWN = -1
Array = np.ndarray[Any, np.dtype[Any]]


class TurnLine(msgspec.Struct, gc=False):
    """A turn as a transcript has it, as far as its tokens go."""

    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    logprobs: list[float | None] | None = None
    new_row: str | None = None
    finish_reason: str | None = None
    usage: Usage | None = None


class TurnColumns:
    """All turns of a file, in its order."""

    def __init__(self) -> None:
        self.counts = array("q")  # turns of each rollout
        self.prompts = array("q")  # tokens that are new in a turn; UNKNOWN where nobody says
        self.sampled = array("q")
        self.logprob_counts = array("q")
        self.logprobs = array("d")  # their sum; NaN where one is not finite
        self.is_new = array("b")
        self.is_cut_off = array("b")
        self.untrained: dict[int, float] = {}  # by turn: the logprob of a first token, which nothing predicts
        self.unknown: dict[int, list[TurnLine]] = {}  # by rollout: turns that have not all their token ids

    def add(self, turns_R: Sequence[list[TurnLine]]) -> None:
        first_rollout, first_turn = len(self.counts), len(self.prompts)
        turns = [turn for turns in turns_R for turn in turns]
        prompts = [UNKNOWN if turn.prompt_token_ids is None else len(turn.prompt_token_ids) for turn in turns]
        sampled = [UNKNOWN if turn.token_ids is None else len(turn.token_ids) for turn in turns]
        self.counts.extend([len(turns) for turns in turns_R])
        self.prompts.extend(prompts)
        self.sampled.extend(sampled)
        self.logprob_counts.extend([len(turn.logprobs or ()) for turn in turns])
        self.logprobs.extend([_sum(turn.logprobs or ()) for turn in turns])
        self.is_new.extend([turn.new_row is not None for turn in turns])
        self.is_cut_off.extend([turn.finish_reason == "length" for turn in turns])
        if 0 in prompts:
            for place, turn in enumerate(turns, first_turn):
                if turn.prompt_token_ids == [] and turn.logprobs:
                    self.untrained[place] = _sum(turn.logprobs[:1])
        if UNKNOWN in prompts or UNKNOWN in sampled:
            for place, own in enumerate(turns_R, first_rollout):
                if any(turn.prompt_token_ids is None or turn.token_ids is None for turn in own):
                    self.unknown[place] = own


class Parts(NamedTuple):
    """What the columns come to."""

    seen: Ints  # of each turn: tokens before it; UNKNOWN where nobody says
    sampled: Ints
    cut_off: Bools  # of each turn: a limit ended its reply
    counts: Ints  # of each rollout: its parts
    trained: Ints  # of each part: tokens that a loss sees
    logprobs: Floats  # and the sum of their logprobs
    misaligned: Ints  # turns with another number of logprobs than of tokens


def parts_of(columns: TurnColumns) -> Parts:
    counts = np.array(columns.counts, np.int64)
    prompts, sampled = np.array(columns.prompts, np.int64), np.array(columns.sampled, np.int64)
    rollout = np.repeat(np.arange(len(counts)), counts)
    begins = np.array(columns.is_new, np.bool_)
    begins[(np.cumsum(counts) - counts)[counts > 0]] = True
    part = np.cumsum(begins) - 1
    is_known = (prompts != UNKNOWN) & (sampled != UNKNOWN)
    new, generated = np.where(is_known, prompts, 0), np.where(is_known, sampled, 0)
    before = np.cumsum(new + generated) - new - generated
    seen = before - before[begins][part] + new  # since the part began
    trained = np.bincount(part, weights=generated, minlength=int(begins.sum()))
    logprobs = np.bincount(part, weights=columns.logprobs, minlength=len(trained))
    for turn, logprob in columns.untrained.items():
        if seen[turn] == 0:
            trained[part[turn]] -= 1
            logprobs[part[turn]] -= logprob
    starts = np.cumsum(counts) - counts
    for place, turns in columns.unknown.items():
        own = slice(starts[place], starts[place] + counts[place])
        lengths = lengths_of(turns)
        seen[own] = [UNKNOWN if length is None else length for length, _ in lengths]
        generated[own] = [UNKNOWN if length is None else length for _, length in lengths]
    logprob_counts = np.array(columns.logprob_counts, np.int64)
    return Parts(
        seen=seen,
        sampled=generated,
        cut_off=np.array(columns.is_cut_off, np.bool_),
        counts=np.bincount(rollout[begins], minlength=len(counts)),
        trained=trained.astype(np.int64),
        logprobs=logprobs.astype(np.float64),
        misaligned=np.flatnonzero(is_known & (logprob_counts > 0) & (logprob_counts != sampled)),
    )


def _sum(logprobs: Sequence[float | None]) -> float:
    try:
        return sum(logprobs)  # type: ignore[arg-type]
    except TypeError:  # null: it was not finite
        return float("nan")


class Row(NamedTuple):
    """A token row, with what of it a loss sees."""

    token_ids: Array
    mask: Array
    logprobs: Array  # float32, as a trainer has them


class RowDigests(NamedTuple):
    token_ids: int
    mask: int
    logprobs: int  # of those that a loss sees


def digests_of(turns: Sequence[TurnLine]) -> list[RowDigests]:
    """The digests of every part of a rollout."""
    if any(turn.token_ids is None or turn.prompt_token_ids is None for turn in turns):
        return [RowDigests(0, 0, 0)] * sum(
            turn.new_row is not None or not number for number, turn in enumerate(turns)
        )
    return [row_digests(*row) for row in _rows(turns)]


def row_digests(token_ids: Array, mask: Array, logprobs: Array | None) -> RowDigests:
    """The digests of a row of a transcript or of an export."""
    seen = b"" if logprobs is None else (logprobs[mask] + np.float32(0)).tobytes()
    digest = xxhash.xxh3_64_intdigest
    return RowDigests(digest(token_ids.tobytes()), digest(mask.tobytes()), digest(seen))


def row_on(line: bytes, part: int) -> Row:
    """One row of the transcript on a line."""
    turns = msgspec.json.decode(line, type=_Turns).turns or []
    return _rows(turns)[part]


class _Turns(msgspec.Struct):
    turns: list[TurnLine] | None = None


def _rows(turns: Sequence[TurnLine]) -> list[Row]:
    found = []
    sampled = iter([value for turn in turns for value in turn.logprobs or [None] * len(turn.token_ids or ())])
    for row in token_rows(turns):
        logprobs = [next(sampled, None) if is_sampled else None for is_sampled in row.sampled]
        mask = np.array(row.sampled, np.bool_)
        mask[:1] = False  # nothing predicts a first token
        found.append(Row(np.array(row.token_ids, np.int32), mask, np.array(logprobs, np.float32)))
    return found
