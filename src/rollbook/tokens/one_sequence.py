"""One trajectory of an export by its place, `ITERATION/GROUP/TRAJECTORY[/PART]`, token by token."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from rollbook.errors import UsageError
from rollbook.records.token_columns import TOKEN_COLUMNS
from rollbook.records.token_places import TokenSource, whole_pieces
from rollbook.records.tokens import TokenSequence
from rollbook.tokens.chunks import token_text


class Place(NamedTuple):
    iteration: int
    group_idx: int
    traj_idx: int
    part: int | None = None

    def __str__(self) -> str:
        return "/".join(str(number) for number in self if number is not None)

    def names(self, sequence: TokenSequence) -> bool:
        is_here = sequence.iteration == self.iteration and self[1:3] == place_in_iteration(sequence)
        return is_here and self.part in (None, sequence.part)


def place_in_iteration(sequence: TokenSequence) -> tuple[int | None, int | None]:
    """Group and trajectory; of records that do not say them, the process and the number of the record."""
    if sequence.group_idx is None:
        return sequence.rank, sequence.export_sequence_idx
    return sequence.group_idx, sequence.traj_idx


class Found(NamedTuple):
    """The training rows of a trajectory, each as the first optimiser step that took it saw it."""

    sequences: list[TokenSequence]
    steps: list[int]  # all optimiser steps that took one of them


def parse_place(words: str) -> Place:
    numbers = words.split("/")
    if not 3 <= len(numbers) <= 4 or not all(number.isascii() and number.isdecimal() for number in numbers):
        raise UsageError(f"--at {words}: write ITERATION/GROUP/TRAJECTORY, such as 398/7/3, or with /PART")
    return Place(*map(int, numbers))


def find_sequences(source: TokenSource, place: Place) -> Found:
    found: dict[tuple[str, int | None], TokenSequence] = {}
    steps: set[int] = set()
    others = 0
    example: TokenSequence | None = None
    pieces = [piece for piece in source.pieces() if piece.iteration in (None, place.iteration)]
    for piece in whole_pieces(pieces):
        for sequence in piece.read():
            if place.names(sequence):
                key = sequence.split, sequence.part
                if key not in found or (sequence.optim_step or 0) < (found[key].optim_step or 0):
                    found[key] = sequence
                steps.add(sequence.optim_step or 0)
            elif sequence.iteration == place.iteration:
                others, example = others + 1, example or sequence
    if not found:
        raise UsageError(_not_there(source, place, others, example))
    return Found([found[key] for key in sorted(found, key=lambda key: (key[0], key[1] or 0))], sorted(steps))


def _not_there(source: TokenSource, place: Place, others: int, example: TokenSequence | None) -> str:
    where = source.only or source.root
    if example is None:
        return f"{where}: no tokens of iteration {place.iteration}; rollbook tokens {where} says what it has"
    near = "/".join(map(str, (example.iteration, *place_in_iteration(example))))
    return (
        f"{where}: no tokens of {place}; iteration {place.iteration} has {others} other records, such as "
        f"{near}. What was not trained on, or not chosen by `fraction`, is not exported"
    )


_KEYS = (
    "split", "iteration", "group_idx", "traj_idx", "part", "optim_step", "rank", "data_file", "data_row",
    "task_id", "env_name", "policy_version",
)  # fmt: skip


def keys_of(sequence: TokenSequence) -> dict[str, Any]:
    return {name: getattr(sequence, name) for name in _KEYS}


def rows_of(sequence: TokenSequence) -> list[dict[str, Any]]:
    """Every token with its columns, by the names that a query has for them."""
    columns = {column.name: sequence.get(column.array) for column in TOKEN_COLUMNS}
    known = {column.name: sequence.is_known(column.array) for column in TOKEN_COLUMNS}
    step_of = np.array([*(turn.step_idx for turn in sequence.turns), -1])[sequence.turn_of]
    rows = []
    for offset in range(len(sequence)):
        row: dict[str, Any] = {"token_idx": offset, "text": token_text(sequence, offset)}
        row["step_idx"] = None if step_of[offset] < 0 else int(step_of[offset])
        for name, column in columns.items():
            if column is not None:
                row[name] = column[offset].item() if known[name][offset] else None
        rows.append(row)
    return rows
