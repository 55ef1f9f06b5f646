"""From a micro-batch as the trainer saw it to the records of the token export.

Every value is put at the place (example, offset) that the batch has for its token, so nothing crosses the
border between two packed sequences, and what was not trained has no value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from rollbook.records.token_files import SCHEMA_VERSION, RunIdentity
from rollbook.records.token_writers import Array, TokenRecords
from rollbook.train.batch import Batch, ExampleKey, RowKey
from rollbook.train.losses import Reason
from rollbook.train.token_text import TokenText

# What a batch calls a column, and what a record does.
_OF_BATCH = {
    "rewards": "reward",
    "advantages": "advantage",
    "inference_logprobs": "sampled_logprob",
}
_SOMETIMES = {"reference_logprobs": "reference_logprob", "weights": "weight"}


class Noted(NamedTuple):
    """What the process that samples knows of a group."""

    task_id: str
    env_name: str


class SeenBatch(NamedTuple):
    """A micro-batch on its way to the writer."""

    iteration: int
    step: int  # of the optimiser, within the iteration
    micro_step: int
    batch: Batch
    chosen: list[int]  # the examples of it that are exported
    rows: dict[str, int]  # names of the rows of `values_QN`
    values_QN: Tensor  # on the host: one row per quantity, one value per trained token


class TokenColumns(NamedTuple):
    """The columns of some examples of a micro-batch; the shapes are those of `TokenRecords`."""

    bound_R: Array
    token_F: Array
    trained_F: Array
    floats_F: dict[str, Array | None]
    masks_F: dict[str, Array | None]


def columns_of(
    batch: Batch, chosen: Sequence[int], rows: Mapping[str, int], values_QN: Tensor
) -> TokenColumns:
    """What the trainer saw of the chosen examples; `rows` names the rows of `values_QN`."""
    bound_R = np.cumsum([0, *(batch.lengths[place] for place in chosen)])
    example_N, offset_N = batch.example_N.numpy(), batch.offset_N.numpy()
    begin_E = np.full(len(batch.lengths), -1, np.int64)  # of each example in the flat arrays
    begin_E[chosen] = bound_R[:-1]
    flat_N = begin_E[example_N] + offset_N
    own: Any = slice(None)  # which trained tokens are of the chosen examples
    if len(chosen) < len(batch.lengths):
        own = begin_E[example_N] >= 0
        flat_N = flat_N[own]

    def placed(value_N: Tensor | None) -> Array | None:
        if value_N is None:
            return None
        value_F = np.full(bound_R[-1], np.nan, np.float32)
        value_F[flat_N] = value_N.numpy()[own]
        return value_F

    def row(name: str) -> Tensor | None:
        number = rows.get(name)
        return None if number is None else values_QN[number]

    given = batch.columns_N
    floats_F = {name: placed(given.get(source)) for name, source in _OF_BATCH.items()}
    floats_F |= {name: placed(row(name)) for name in ("trainer_logprobs", "entropy", "importance_ratio")}
    floats_F |= {name: placed(given[source]) for name, source in _SOMETIMES.items() if source in given}
    trained_F = np.zeros(bound_R[-1], np.bool_)
    trained_F[flat_N] = True
    return TokenColumns(
        bound_R=bound_R,
        token_F=_tokens(batch, chosen),
        trained_F=trained_F,
        floats_F=floats_F,
        masks_F=_masks(placed(row("reason"))),
    )


def records_of(
    seen: SeenBatch,
    identity: RunIdentity,
    rank: int,
    first: int,
    notes: Mapping[int, Noted],
    text: TokenText,
) -> TokenRecords:
    """The records of the chosen examples; `first` is the running number of the first one."""
    columns = columns_of(seen.batch, seen.chosen, seen.rows, seen.values_QN)
    shared, turns = _shared_keys(seen, identity, rank), _turns(seen.batch)
    heads = [
        shared
        | {"micro_sequence_idx": place, "export_sequence_idx": first + number}
        | _keys_of(seen.batch.keys[place], notes, None if turns is None else turns[place])
        for number, place in enumerate(seen.chosen)
    ]
    made = text.of(columns.token_F, columns.bound_R)
    return TokenRecords(heads, made.texts, text_offset_F=made.offset_F, **columns._asdict())


def _tokens(batch: Batch, chosen: Sequence[int]) -> Array:
    flat = batch.forward.input_ids.numpy().reshape(-1)
    starts = batch.starts
    return np.concatenate(
        [flat[starts[place] : starts[place] + batch.lengths[place]] for place in chosen]
    ).astype(np.int32)


def _masks(reason_F: Array | None) -> dict[str, Array | None]:
    """What the loss left out, by the reasons it gave; False where nothing was trained."""
    if reason_F is None:
        return dict.fromkeys(("is_masked", "is_masked_high", "is_masked_low"))
    return {
        "is_masked": (reason_F != Reason.TRAINED) & ~np.isnan(reason_F),
        "is_masked_high": reason_F == Reason.CLIPPED_HIGH,
        "is_masked_low": reason_F == Reason.CLIPPED_LOW,
    }


def _shared_keys(seen: SeenBatch, identity: RunIdentity, rank: int) -> dict[str, Any]:
    """The keys that every record of a micro-batch has in common."""
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": identity.run_id,
        "attempt": identity.attempt,
        "split": identity.split,
        "iteration": seen.iteration,
        "step": seen.iteration,
        "optim_step": seen.step,
        "rank": rank,
        "micro_step": seen.micro_step,
    }


def _keys_of(
    key: ExampleKey | RowKey | None, notes: Mapping[int, Noted], turns: list[dict[str, Any]] | None
) -> dict[str, Any]:
    """The keys that say which rollout, or which row of the data, a record is of."""
    row = key if isinstance(key, RowKey) else None
    rollout = key if isinstance(key, ExampleKey) else None
    noted = None if rollout is None else notes.get(rollout.group)
    keys: dict[str, Any] = {} if rollout is None else {"split": rollout.split}
    return keys | {
        "group_idx": None if rollout is None else rollout.group,
        "traj_idx": None if rollout is None else rollout.trajectory,
        "part": None if rollout is None else rollout.part,
        "data_file": None if row is None else row.file,
        "data_row": None if row is None else row.row,
        "task_id": None if noted is None else noted.task_id,
        "env_name": None if noted is None else noted.env_name,
        "policy_version": turns[0]["policy_version"] if turns else None,
        "turns": turns,
    }


def _turns(batch: Batch) -> list[list[dict[str, Any]]] | None:
    """The turns of each example with the places of their trained tokens; None where there are no turns."""
    if "turn" not in batch.columns_N or not batch.trained_tokens:
        return None
    example_N, offset_N = batch.example_N.numpy(), batch.offset_N.numpy()
    turn_N = batch.columns_N["turn"].numpy()
    begins_N = np.flatnonzero((np.diff(example_N) != 0) | (np.diff(turn_N) != 0)) + 1
    begin_S = np.concatenate([[0], begins_N])
    last_S = np.concatenate([begins_N, [len(example_N)]]) - 1

    def at_begin(name: str) -> list[Any]:
        column_N = batch.columns_N.get(name)
        return [None] * len(begin_S) if column_N is None else column_N.numpy()[begin_S].tolist()

    found: list[list[dict[str, Any]]] = [[] for _ in batch.keys]
    for example, turn, start, last, version, temperature in zip(
        example_N[begin_S].tolist(),
        turn_N[begin_S].tolist(),
        offset_N[begin_S].tolist(),
        offset_N[last_S].tolist(),
        at_begin("version"),
        at_begin("temperature"),
        strict=True,
    ):
        found[example].append(
            {
                "step_idx": turn,
                "start": start,
                "end": last + 1,
                "policy_version": None if version == -1 else version,
                "temperature": temperature,
            }
        )
    return found
