"""Examples and the batches they are packed into: every value of a token moves together with the token.

A name says its shape: `_T` has one value per token of an example, `_N` one per trained token of a batch.
Packed sequences stand side by side in one row without padding and without contact: positions start again
with each, and attention stays inside it (`attention.py`), so a packed batch is exactly its examples one by
one. A test at every start proves it (`checks.py`). Models that cannot do this get padded rows (`pad`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

Int32Array = np.ndarray[Any, np.dtype[np.int32]]
BoolArray = np.ndarray[Any, np.dtype[np.bool_]]
IntArray = np.ndarray[Any, np.dtype[np.int64]]
Column = np.ndarray[Any, Any]

# The columns we know, with the value of a token that was given none. A loss of your own may use further
# names.
COLUMNS: Mapping[str, np.generic] = MappingProxyType(
    {
        "weight": np.float32(1.0),  # how much a token counts in the loss and in its denominator
        "reward": np.float32("nan"),  # of the rollout; no loss reads it, the token export does
        "advantage": np.float32(0.0),
        "sampled_logprob": np.float32("nan"),  # when it was sampled, at `temperature`
        "reference_logprob": np.float32("nan"),
        "temperature": np.float32(1.0),
        "turn": np.int32(-1),
        "version": np.int32(-1),  # of the policy that sampled it
    }
)


class ExampleKey(NamedTuple):
    """Where an example comes from. `part` counts the rows of one trajectory whose history was rewritten."""

    split: str
    iteration: int
    group: int
    trajectory: int
    part: int = 0

    @property
    def places(self) -> tuple[str | int, ...]:
        """What a choice among examples follows from."""
        return tuple(self)


class RowKey(NamedTuple):
    """The row of a dataset that an example was made from; the same in every epoch."""

    file: str  # as the settings name it
    row: int  # its line, or the row of a Parquet file, from 1

    @property
    def places(self) -> tuple[str | int, ...]:
        """What a choice among examples follows from, wherever the file lies."""
        return Path(self.file).name, self.row


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One sequence of tokens, and which of them are trained. The first one never is: nothing predicts it."""

    token_T: Int32Array
    trained_T: BoolArray
    columns_T: Mapping[str, Column] = field(default_factory=dict)
    key: ExampleKey | RowKey | None = None

    def __len__(self) -> int:
        return len(self.token_T)


class Forward(NamedTuple):
    """All that the model sees of a batch."""

    input_ids: Tensor  # 1 x T packed, B x L padded
    position_ids: Tensor
    longest: int
    boundaries: Tensor | None  # packed: starts of the sequences and the end, int32
    attention_mask: Tensor | None  # padded only


class Batch(NamedTuple):
    """What one forward and backward pass takes."""

    forward: Forward
    row_N: Tensor  # the row of the flat output that predicts a trained token: the one before it
    target_N: Tensor  # the token itself
    example_N: Tensor  # which example of this batch it belongs to
    offset_N: Tensor  # and where in it
    columns_N: dict[str, Tensor]  # values of trained tokens only; those of a prompt never travel
    keys: list[ExampleKey | RowKey | None]
    lengths: list[int]  # of its examples

    @property
    def real_tokens(self) -> int:
        """Without padding; none where nothing of it is trained here."""
        return sum(self.lengths)

    @property
    def starts(self) -> list[int]:
        """Where in the flat tokens each example begins."""
        if self.forward.boundaries is None:
            width = self.forward.input_ids.shape[1]
            return [row * width for row in range(len(self.lengths))]
        return [0, *accumulate(self.lengths[:-1])] if self.lengths else []

    @property
    def allocated_tokens(self) -> int:
        return self.forward.input_ids.numel()

    @property
    def trained_tokens(self) -> int:
        return len(self.target_N)

    def to(self, device: torch.device) -> Batch:
        def move(value: Any) -> Any:
            return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value

        return self._replace(
            forward=Forward(*map(move, self.forward)),
            row_N=move(self.row_N),
            target_N=move(self.target_N),
            example_N=move(self.example_N),
            offset_N=move(self.offset_N),
            columns_N={name: move(column) for name, column in self.columns_N.items()},
        )


class Shape(NamedTuple):
    """One size for every batch, for compiled kernels: filled up with sequences of padding."""

    tokens: int
    longest: int


def pack(
    examples: Sequence[Example], capacity: int, *, shape: Shape | None = None, pad_token: int = 0
) -> list[Batch]:
    """Packed batches of at most `capacity` tokens; an example longer than that gets a batch of its own."""
    lengths = [len(example) for example in examples]
    alone = [[place] for place, length in enumerate(lengths) if length > capacity]
    fitting = np.flatnonzero(np.asarray(lengths, np.int64) <= capacity).tolist()
    bins = [
        [fitting[place] for place in some] for some in best_fit([lengths[at] for at in fitting], capacity)
    ]
    columns = column_names(examples)
    return [
        packed_batch([examples[place] for place in some], shape=shape, pad_token=pad_token, columns=columns)
        for some in alone + bins
    ]


def pad(examples: Sequence[Example], capacity: int, *, pad_token: int = 0) -> list[Batch]:
    """Padded batches of at most `capacity` tokens with their padding, examples of similar length together."""
    columns = column_names(examples)
    batches: list[Batch] = []
    rows: list[Example] = []
    for example in sorted(
        examples, key=lambda example: -len(example)
    ):  # so the first one of a batch is its longest
        if rows and (len(rows) + 1) * len(rows[0]) > capacity:
            batches.append(padded_batch(rows, pad_token=pad_token, columns=columns))
            rows = []
        rows.append(example)
    if rows:
        batches.append(padded_batch(rows, pad_token=pad_token, columns=columns))
    return batches


def idle(batch: Batch) -> Batch:
    """The batch without anything to train, for a process that must take part and has no data of its own."""
    none = {name: getattr(batch, name)[:0] for name in ("row_N", "target_N", "example_N", "offset_N")}
    columns = {name: column[:0] for name, column in batch.columns_N.items()}
    return batch._replace(**none, columns_N=columns, keys=[], lengths=[])


def with_columns(batch: Batch, names: Sequence[str]) -> Batch:
    """The batch with these columns too, where it lacks one with the value of a token that was given none."""
    missing = {
        name: torch.from_numpy(np.full(batch.trained_tokens, COLUMNS[name]))
        for name in names
        if name not in batch.columns_N
    }
    return batch._replace(columns_N=batch.columns_N | missing) if missing else batch


def column_names(examples: Sequence[Example]) -> list[str]:
    """The columns that any of the examples has, in a fixed order."""
    return sorted({name for example in examples for name in example.columns_T})


def packed_batch(
    examples: Sequence[Example],
    *,
    shape: Shape | None = None,
    pad_token: int = 0,
    columns: Sequence[str] | None = None,
) -> Batch:
    """All examples in one row."""
    lengths = [len(example) for example in examples]
    real = sum(lengths)
    padding = max(0, shape.tokens - real) if shape is not None else 0
    tokens = np.concatenate(
        [example.token_T for example in examples] + [np.full(padding, pad_token, np.int32)]
    )
    all_lengths = lengths + (_pieces(padding, shape.longest) if shape is not None else [])
    boundaries = np.concatenate([[0], np.cumsum(all_lengths)])
    forward = Forward(
        input_ids=torch.from_numpy(tokens.astype(np.int64))[None],
        position_ids=torch.from_numpy(np.concatenate([np.arange(length) for length in all_lengths]))[None],
        longest=max(all_lengths) if shape is None else shape.longest,
        boundaries=torch.from_numpy(_filled_up(boundaries) if shape else boundaries).int(),
        attention_mask=None,
    )
    return _trained(examples, forward, boundaries[: len(examples)].tolist(), columns)


def padded_batch(
    examples: Sequence[Example], *, pad_token: int = 0, columns: Sequence[str] | None = None
) -> Batch:
    """One example per row, filled up on the right: for models that cannot keep packed sequences apart."""
    width = max(len(example) for example in examples)
    tokens = np.full((len(examples), width), pad_token, np.int64)
    mask = np.zeros((len(examples), width), np.int64)
    for row, example in enumerate(examples):
        tokens[row, : len(example)] = example.token_T
        mask[row, : len(example)] = 1
    forward = Forward(
        input_ids=torch.from_numpy(tokens),
        position_ids=torch.arange(width).repeat(len(examples), 1),
        longest=width,
        boundaries=None,
        attention_mask=torch.from_numpy(mask),
    )
    return _trained(examples, forward, [row * width for row in range(len(examples))], columns)


def _trained(
    examples: Sequence[Example], forward: Forward, starts: Sequence[int], names: Sequence[str] | None
) -> Batch:
    """The one place where trained tokens and all that belongs to them are put together."""
    names = column_names(examples) if names is None else names
    offsets, rows, targets, numbers = [], [], [], []
    columns: dict[str, list[Column]] = {name: [] for name in names}
    for number, (example, start) in enumerate(zip(examples, starts, strict=True)):
        offset_K = np.flatnonzero(example.trained_T[1:]) + 1
        offsets.append(offset_K)
        rows.append(start + offset_K - 1)
        targets.append(example.token_T[offset_K])
        numbers.append(np.full(len(offset_K), number))
        for name in names:
            columns[name].append(_column(example, name)[offset_K])
    columns_N = {name: np.concatenate(parts) for name, parts in columns.items()}
    _check_columns(columns_N)
    return Batch(
        forward=forward,
        row_N=_joined(rows),
        target_N=_joined(targets),
        example_N=_joined(numbers),
        offset_N=_joined(offsets),
        columns_N={name: torch.from_numpy(column) for name, column in columns_N.items()},
        keys=[example.key for example in examples],
        lengths=[len(example) for example in examples],
    )


def _joined(parts: Sequence[Column]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64))


def _column(example: Example, name: str) -> Column:
    default = COLUMNS.get(name)
    column = example.columns_T.get(name)
    if column is None:
        if default is None:
            raise ValueError(f"column {name!r} is missing in the example {example.key}")
        return np.full(len(example), default)
    if len(column) != len(example):
        raise ValueError(
            f"column {name!r} has {len(column)} values for the {len(example)} tokens of {example.key}"
        )
    return np.asarray(column, np.float32 if default is None else default.dtype)


def _check_columns(columns_N: Mapping[str, Column]) -> None:
    temperature_N = columns_N.get("temperature")
    if temperature_N is not None and not (np.isfinite(temperature_N) & (temperature_N > 0)).all():
        raise ValueError(
            "a trained token has a temperature that is not more than 0: it was not sampled at random"
        )
    weight_N = columns_N.get("weight")
    if weight_N is not None and not (np.isfinite(weight_N) & (weight_N >= 0)).all():
        raise ValueError("the weight of a trained token must be a finite number that is not negative")


def best_fit(lengths: Sequence[int] | IntArray, capacity: int) -> list[list[int]]:
    """Bins of indices whose lengths sum to at most `capacity`; no length may exceed it.

    Best-fit decreasing: the longest sequence first, each into the fullest bin that still takes it.
    """
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


_BOUNDARIES_STEP = 128  # their number is rounded up to a multiple of this, so that it hardly ever changes


def _pieces(total: int, longest: int) -> list[int]:
    return [min(longest, total - start) for start in range(0, total, longest)]


def _filled_up(boundaries: IntArray) -> IntArray:
    """With sequences of no tokens at the end."""
    return np.pad(boundaries, (0, -len(boundaries) % _BOUNDARIES_STEP), mode="edge")
