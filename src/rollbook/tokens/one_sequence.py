"""One trajectory of an export by its place, `ITERATION/GROUP/TRAJECTORY[/PART][:TOKEN]`, token by token."""

from __future__ import annotations

import re
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
    token: int | None = None  # its offset in the row

    def __str__(self) -> str:
        row = "/".join(str(number) for number in self[:4] if number is not None)
        return row if self.token is None else f"{row}:{self.token}"

    def names(self, sequence: TokenSequence) -> bool:
        is_here = sequence.iteration == self.iteration and self[1:3] == place_in_iteration(sequence)
        return is_here and self.part in (None, sequence.part or 0)


def place_in_iteration(sequence: TokenSequence) -> tuple[int | None, int | None]:
    """Group and trajectory; of records that do not say them, the process and the number of the record."""
    if sequence.group_idx is None:
        return sequence.rank, sequence.export_sequence_idx
    return sequence.group_idx, sequence.traj_idx


class Found(NamedTuple):
    """The training rows of a trajectory, each as one optimiser step that took it saw it."""

    sequences: list[TokenSequence]
    steps: list[int]  # all optimiser steps that took one of them


_PLACE = re.compile(r"(\d+)/(\d+)/(\d+)(?:/(\d+))?(?::(\d+))?", re.ASCII)


def parse_place(words: str) -> Place:
    found = _PLACE.fullmatch(words)
    if found is None:
        raise UsageError(
            f"--at {words}: write ITERATION/GROUP/TRAJECTORY, such as 398/7/3, or with /PART, or with :TOKEN"
        )
    iteration, group_idx, traj_idx = map(int, found.groups()[:3])
    part, token = (None if number is None else int(number) for number in found.groups()[3:])
    if token is not None and part is None:
        part = 0  # a token is one of a row
    return Place(iteration, group_idx, traj_idx, part, token)


def find_sequences(source: TokenSource, place: Place, optim_step: int | None = None) -> Found:
    """The rows of a place, as an optimiser step saw them; where none is named, the first one of each."""
    found: dict[tuple[str, int | None], TokenSequence] = {}
    steps: set[int] = set()
    others = 0
    example: TokenSequence | None = None
    pieces = [piece for piece in source.pieces() if piece.iteration in (None, place.iteration)]
    for piece in whole_pieces(pieces):
        for sequence in piece.read():
            if place.names(sequence):
                key, step = (sequence.split, sequence.part), sequence.optim_step or 0
                steps.add(step)
                if optim_step in (None, step) and (key not in found or step < (found[key].optim_step or 0)):
                    found[key] = sequence
            elif sequence.iteration == place.iteration:
                others, example = others + 1, example or sequence
    if not steps:
        raise UsageError(_not_there(source, place, others, example))
    if not found:
        known = ", ".join(map(str, sorted(steps)))
        raise UsageError(f"--optim-step {optim_step}: {place} was trained in: {known}")
    longest = max(map(len, found.values()))
    if place.token is not None and place.token >= longest:
        raise UsageError(f"--at {place}: the row has {longest} tokens, counted from 0")
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


def rows_of(sequence: TokenSequence, only: int | None = None) -> list[dict[str, Any]]:
    """Every token with its columns, or one of them, by the names that a query has for them."""
    columns = {column.name: sequence.get(column.array) for column in TOKEN_COLUMNS}
    known = {column.name: sequence.is_known(column.array) for column in TOKEN_COLUMNS}
    step_of = np.array([*(turn.step_idx for turn in sequence.turns), -1])[sequence.turn_of]
    rows = []
    for offset in range(len(sequence)) if only is None else [only]:
        row: dict[str, Any] = {"token_idx": offset, "text": token_text(sequence, offset)}
        row["step_idx"] = None if step_of[offset] < 0 else int(step_of[offset])
        for name, column in columns.items():
            if column is not None:
                row[name] = column[offset].item() if known[name][offset] else None
        rows.append(row)
    return rows
