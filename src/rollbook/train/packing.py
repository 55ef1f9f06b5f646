"""Sequences of any length side by side in one row of tokens: no padding between them, and no contact.

Best-fit decreasing: the longest sequence first, each into the fullest bin that still takes it. Positions
start again with every sequence and attention stays inside it (`attention.py`), so a packed batch is exactly
its sequences one by one, which a test at every start proves (`selftests.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class Sample(NamedTuple):
    """One tokenised conversation: which tokens there are, and which of them are learned."""

    tokens: np.ndarray[tuple[int], np.dtype[np.int32]]
    trained: np.ndarray[tuple[int], np.dtype[np.bool_]]


class Batch(NamedTuple):
    """What a forward pass takes. `rows` of the output, flattened, predict `targets`."""

    input_ids: Tensor  # 1 x T packed, B x L padded
    position_ids: Tensor
    rows: Tensor  # N: where a trained token is predicted, that is one before it
    targets: Tensor  # N
    boundaries: Tensor | None  # packed: starts of the sequences and the end, int32
    longest: int
    attention_mask: Tensor | None  # padded only
    real_tokens: int  # without padding
    lengths: list[int]

    @property
    def allocated_tokens(self) -> int:
        return self.input_ids.numel()

    def to(self, device: torch.device) -> Batch:
        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        return self._replace(
            input_ids=move(self.input_ids),
            position_ids=move(self.position_ids),
            rows=move(self.rows),
            targets=move(self.targets),
            boundaries=None if self.boundaries is None else move(self.boundaries),
            attention_mask=None if self.attention_mask is None else move(self.attention_mask),
        )


def best_fit(
    lengths: Sequence[int] | np.ndarray[tuple[int], np.dtype[np.int64]], capacity: int
) -> list[list[int]]:
    """Bins of indices whose lengths sum to at most `capacity`; no length may exceed it."""
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")
    bins: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    open_rooms = (
        0  # bit r is set while some bin has exactly r tokens left: the best fit is the lowest such bit
    )
    for index in order.tolist():
        length = int(lengths[index])
        if length > capacity:
            raise ValueError(f"a sequence of {length} tokens does not fit into {capacity}")
        fitting = open_rooms >> length
        if fitting:
            room = length + ((fitting & -fitting).bit_length() - 1)
            place = by_room[room].pop()
            if not by_room[room]:
                open_rooms &= ~(1 << room)
        else:
            room, place = capacity, len(bins)
            bins.append([])
        bins[place].append(index)
        left = room - length
        if left:
            by_room[left].append(place)
            open_rooms |= 1 << left
    return bins


class Shape(NamedTuple):
    """One size for every batch, for compiled kernels: filled up with sequences of padding."""

    tokens: int
    longest: int


_BOUNDARIES_STEP = 128  # their number is rounded up to a multiple of this, so that it hardly ever changes


def packed_batch(samples: Sequence[Sample], *, shape: Shape | None = None, pad_token: int = 0) -> Batch:
    """All samples in one row."""
    lengths = [len(sample.tokens) for sample in samples]
    real = sum(lengths)
    padding = max(0, shape.tokens - real) if shape is not None else 0
    tokens = np.concatenate([sample.tokens for sample in samples] + [np.full(padding, pad_token, np.int32)])
    all_lengths = lengths + (_pieces(padding, shape.longest) if shape is not None else [])
    positions = np.concatenate([np.arange(length) for length in all_lengths])
    boundaries = np.concatenate([[0], np.cumsum(all_lengths)])
    rows = np.concatenate(
        [start + _predicting(sample) for start, sample in zip(boundaries, samples, strict=False)]
    )
    return Batch(
        input_ids=torch.from_numpy(tokens.astype(np.int64))[None],
        position_ids=torch.from_numpy(positions)[None],
        rows=torch.from_numpy(rows),
        targets=torch.from_numpy(tokens[rows + 1].astype(np.int64)),
        boundaries=torch.from_numpy(_filled_up(boundaries) if shape else boundaries).int(),
        longest=max(all_lengths) if shape is None else shape.longest,
        attention_mask=None,
        real_tokens=real,
        lengths=lengths,
    )


def _pieces(total: int, longest: int) -> list[int]:
    return [min(longest, total - start) for start in range(0, total, longest)]


def _filled_up(boundaries: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """With sequences of no tokens at the end."""
    return np.pad(boundaries, (0, -len(boundaries) % _BOUNDARIES_STEP), mode="edge")


def padded_batch(samples: Sequence[Sample], *, pad_token: int = 0) -> Batch:
    """One sample a row, filled up on the right: for models that cannot keep packed sequences apart."""
    lengths = [len(sample.tokens) for sample in samples]
    width = max(lengths)
    tokens = np.full((len(samples), width), pad_token, np.int64)
    mask = np.zeros((len(samples), width), np.int64)
    for row, sample in enumerate(samples):
        tokens[row, : lengths[row]] = sample.tokens
        mask[row, : lengths[row]] = 1
    rows = np.concatenate([number * width + _predicting(sample) for number, sample in enumerate(samples)])
    positions = np.broadcast_to(np.arange(width), tokens.shape)
    return Batch(
        input_ids=torch.from_numpy(tokens),
        position_ids=torch.from_numpy(positions.copy()),
        rows=torch.from_numpy(rows),
        targets=torch.from_numpy(tokens.reshape(-1)[rows + 1]),
        boundaries=None,
        longest=width,
        attention_mask=torch.from_numpy(mask),
        real_tokens=sum(lengths),
        lengths=lengths,
    )


def _predicting(sample: Sample) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The places before trained tokens; the first token of a sequence is predicted by nothing."""
    return np.flatnonzero(sample.trained[1:])
