"""The tokens that the loss saw, as flat arrays, some sequences at a time.

A run has millions of tokens; whoever adds them up gets them a few ten thousand at a time and keeps sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rollbook.records.token_columns import MASKS
from rollbook.records.token_places import TokenSource, whole_pieces
from rollbook.records.tokens import TEXT, TokenSequence

Array = np.ndarray[Any, np.dtype[Any]]

_TOKENS = 32_768  # of a chunk, or one sequence if it is longer
READ = (
    "advantages", "inference_logprobs", "trainer_logprobs", "entropy", "log_importance_ratio",
    "importance_ratio", "mismatch_kl", "prob_delta", "reference_logprobs", *MASKS, TEXT,
)  # fmt: skip


class Chunk:
    """The tokens of some sequences that the loss saw. `_N`: one value per token, `_S`: one per sequence.

    Without an export nobody knows what the loss saw; then they are those that were sampled.
    """

    def __init__(self, sequences: Sequence[TokenSequence]) -> None:
        self.sequences = sequences
        self.offsets = [np.flatnonzero(sequence.sampled) for sequence in sequences]
        length_S = np.array([len(offset_N) for offset_N in self.offsets], np.int64)
        self.sequence_N = np.repeat(np.arange(len(sequences)), length_S)
        self.offset_N = _joined(self.offsets, np.int64)
        self._floats: dict[str, Array] = {}

    def __len__(self) -> int:
        return len(self.offset_N)

    @property
    def token_N(self) -> Array:
        return _joined(
            [sequence.token_ids[kept] for sequence, kept in zip(self.sequences, self.offsets, strict=True)],
            np.int32,
        )

    def floats(self, name: str) -> Array:
        """A column, float32; NaN where a token has no value."""
        if name not in self._floats:
            self._floats[name] = _joined([self._part(name, number) for number in range(len(self.sequences))])
        return self._floats[name]

    def flags(self, name: str) -> Array:
        """A mask; false where the sequence has none."""
        flag_N: Array = self.floats(name) == 1
        return flag_N

    def has(self, name: str) -> Array:
        """Which tokens are of sequences with a column."""
        return self.spread([sequence.get(name) is not None for sequence in self.sequences])

    def known(self, name: str) -> Array:
        """Which tokens have a value in a column, be it finite or not."""
        return _joined(
            [
                sequence.is_known(name)[kept]
                for sequence, kept in zip(self.sequences, self.offsets, strict=True)
            ],
            np.bool_,
        )

    def spread(self, values_S: Sequence[Any]) -> Array:
        """For each token the value of its sequence."""
        return np.array(values_S)[self.sequence_N]

    def turn_N(self) -> Array:
        """The turn that sampled each token, -1 where nobody said so."""
        found = []
        for sequence, kept in zip(self.sequences, self.offsets, strict=True):
            step_of = np.array([*(turn.step_idx for turn in sequence.turns), -1], np.int64)
            found.append(step_of[sequence.turn_of[kept]])
        return _joined(found, np.int64)

    def reply_offset_N(self) -> Array:
        """The place of each token in what its turn sampled, -1 where nobody said so."""
        start_of = [np.array([*(turn.start for turn in one.turns), 0], np.int64) for one in self.sequences]
        start_N = _joined(
            [
                starts[sequence.turn_of[kept]]
                for starts, sequence, kept in zip(start_of, self.sequences, self.offsets, strict=True)
            ],
            np.int64,
        )
        return np.where(self.turn_N() < 0, -1, self.offset_N - start_N)

    def ratio_N(self) -> Array:
        """The importance ratio as the loss used it; where no loss did, that of the two logprobs."""
        own_N = self.floats("importance_ratio")
        with np.errstate(over="ignore"):
            return np.where(np.isnan(own_N), np.exp(self.floats("log_importance_ratio")), own_N)

    def pull_N(self) -> Array:
        """|advantage| x ratio, how hard a token pulls on the weights; 0 where nobody knows it."""
        with np.errstate(invalid="ignore"):
            pull_N = np.abs(self.floats("advantages").astype(np.float64)) * self.ratio_N()
        return np.where(np.isfinite(pull_N), pull_N, 0.0)

    def text(self, place: int) -> str:
        """A token as text; its number where the record has no text."""
        sequence, offset = self.sequences[self.sequence_N[place]], int(self.offset_N[place])
        return token_text(sequence, offset)

    def _part(self, name: str, number: int) -> Array:
        column, kept = self.sequences[number].get(name), self.offsets[number]
        return np.full(len(kept), np.nan, np.float32) if column is None else column[kept].astype(np.float32)


def chunks_of(source: TokenSource, iteration: int | None = None) -> Iterator[Chunk]:
    """All tokens of a run, or those of one iteration."""
    wanted = [piece for piece in source.pieces() if iteration is None or piece.iteration in (None, iteration)]
    waiting: list[TokenSequence] = []
    size = 0
    for piece in whole_pieces(wanted):
        for sequence in piece.read(READ):
            if iteration in (None, sequence.iteration):
                waiting.append(sequence)
                size += len(sequence)
            if size >= _TOKENS:
                yield Chunk(waiting)
                waiting, size = [], 0
    if waiting:
        yield Chunk(waiting)


def token_text(sequence: TokenSequence, offset: int) -> str:
    pieces = sequence.pieces
    return f"token {sequence.token_ids[offset]}" if pieces is None else pieces[offset]


def _joined(parts: Sequence[Array], kind: Any = np.float32) -> Array:
    return np.concatenate(parts) if parts else np.zeros(0, kind)
