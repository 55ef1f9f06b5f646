"""From a micro-batch as the trainer saw it to the records of the token export.

Every value is put at the place (example, offset) that the batch has for its token, so nothing crosses the
border between two packed sequences, and what was not trained has no value.
"""

from __future__ import annotations

from collections import defaultdict
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
    lengths_R = np.array([batch.lengths[place] for place in chosen], np.int64)
    bound_R = np.concatenate([[0], np.cumsum(lengths_R)])
    example_N, offset_N = batch.example_N.numpy(), batch.offset_N.numpy()
    begin_E = np.full(len(batch.lengths), -1, np.int64)  # of each example in the flat arrays
    begin_E[chosen] = bound_R[:-1]
    is_chosen_N = begin_E[example_N] >= 0
    flat_N = (begin_E[example_N] + offset_N)[is_chosen_N]

    def placed(value_N: Array | None) -> Array | None:
        if value_N is None:
            return None
        value_F = np.full(bound_R[-1], np.nan, np.float32)
        value_F[flat_N] = value_N[is_chosen_N]
        return value_F

    def column(name: str) -> Array | None:
        found = batch.columns_N.get(name)
        return None if found is None else found.numpy()

    def row(name: str) -> Array | None:
        number = rows.get(name)
        return None if number is None else values_QN[number].numpy()

    floats_F = {name: placed(column(source)) for name, source in _OF_BATCH.items()}
    floats_F |= {name: placed(row(name)) for name in ("trainer_logprobs", "entropy", "importance_ratio")}
    floats_F |= {
        name: placed(column(source)) for name, source in _SOMETIMES.items() if source in batch.columns_N
    }
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
    bound_R = columns.bound_R
    heads, texts, offsets = [], [], []
    turns = _turns(seen.batch)
    for number, place in enumerate(seen.chosen):
        heads.append(_head(seen, identity, rank, first + number, place, notes, turns))
        made = text.of(columns.token_F[bound_R[number] : bound_R[number + 1]])
        texts.append(made.text)
        offsets.append(made.offset_T)
    return TokenRecords(heads, texts, text_offset_F=np.concatenate(offsets), **columns._asdict())


def _tokens(batch: Batch, chosen: Sequence[int]) -> Array:
    flat = batch.forward.input_ids.flatten().numpy()
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


def _head(
    seen: SeenBatch,
    identity: RunIdentity,
    rank: int,
    number: int,
    place: int,
    notes: Mapping[int, Noted],
    turns: Mapping[int, list[dict[str, Any]]] | None,
) -> dict[str, Any]:
    key = seen.batch.keys[place]
    row = key if isinstance(key, RowKey) else None
    key = key if isinstance(key, ExampleKey) else None
    noted = notes.get(key.group) if key is not None else None
    own_turns = None if turns is None else turns.get(place, [])
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": identity.run_id,
        "attempt": identity.attempt,
        "split": key.split if key is not None else identity.split,
        "iteration": seen.iteration,
        "step": seen.iteration,
        "optim_step": seen.step,
        "rank": rank,
        "micro_step": seen.micro_step,
        "micro_sequence_idx": place,
        "export_sequence_idx": number,
        "group_idx": key.group if key is not None else None,
        "traj_idx": key.trajectory if key is not None else None,
        "part": key.part if key is not None else None,
        "data_file": row.file if row is not None else None,
        "data_row": row.row if row is not None else None,
        "task_id": noted.task_id if noted is not None else None,
        "env_name": noted.env_name if noted is not None else None,
        "policy_version": own_turns[0]["policy_version"] if own_turns else None,
        "turns": own_turns,
    }


def _turns(batch: Batch) -> dict[int, list[dict[str, Any]]] | None:
    """The turns of each example with the places of their trained tokens; None where there are no turns."""
    turn_N = batch.columns_N.get("turn")
    if turn_N is None or not len(turn_N):
        return None
    example_N, offset_N = batch.example_N.numpy(), batch.offset_N.numpy()
    begins_N = np.flatnonzero((np.diff(example_N) != 0) | (np.diff(turn_N.numpy()) != 0)) + 1
    begin_S = np.concatenate([[0], begins_N])
    last_S = np.concatenate([begins_N, [len(example_N)]]) - 1
    version_N, temperature_N = batch.columns_N.get("version"), batch.columns_N.get("temperature")
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for begin, last in zip(begin_S.tolist(), last_S.tolist(), strict=True):
        version = None if version_N is None else int(version_N[begin])
        found[int(example_N[begin])].append(
            {
                "step_idx": int(turn_N[begin]),
                "start": int(offset_N[begin]),
                "end": int(offset_N[last]) + 1,
                "policy_version": None if version == -1 else version,
                "temperature": None if temperature_N is None else float(temperature_N[begin]),
            }
        )
    return found
