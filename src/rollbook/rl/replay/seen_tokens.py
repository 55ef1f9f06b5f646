"""What the steps of a replay did with every token, beside what the token export of the run says of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from rollbook.records.layout import TRAIN
from rollbook.records.token_places import exported_sequences
from rollbook.records.token_writers import Array
from rollbook.records.tokens import TokenSequence
from rollbook.rl.replay.findings import Findings, Place, Stage
from rollbook.rl.replay.recorded import RecordedRun
from rollbook.train.batch import Batch, ExampleKey
from rollbook.train.engine import Seen
from rollbook.train.export import NoTokenExport, quantities
from rollbook.train.losses import Loss, LossInputs, LossOutput
from rollbook.train.token_math import TokenOutputs
from rollbook.train.token_records import Noted, columns_of

# The columns of an export by the stage that makes them.
_COLUMNS = {
    Stage.EXAMPLES: ("token_ids", "loss_mask", "rewards", "advantages", "inference_logprobs"),
    Stage.LOGPROBS: ("trainer_logprobs", "entropy"),
    Stage.RATIOS: ("importance_ratio",),
    Stage.MASKS: ("is_masked", "is_masked_high", "is_masked_low"),
}


class Row(NamedTuple):
    """A training row in one optimiser step."""

    optim_step: int
    group_idx: int
    traj_idx: int
    part: int


Columns = dict[str, Array]  # by the name in the export, one value per token


class SeenTokens(NoTokenExport):
    """In the place of the token export: keeps the columns of every row that is trained."""

    def __init__(self, loss: Loss) -> None:
        self._loss = loss
        self.rows: dict[Row, Columns] = {}
        self.slope: dict[int, float] = defaultdict(float)  # of each step's loss: see `_slope`

    def seen(self, iteration: int, step: int, notes: Mapping[int, Noted] | None = None) -> Seen:
        def take(batch: Batch, outputs: TokenOutputs, loss: LossOutput) -> None:
            values = quantities(outputs, loss)
            host_QN = torch.stack([row.float() for row in values.values()]).cpu()
            numbers = {name: number for number, name in enumerate(values)}
            found = columns_of(batch, range(len(batch.keys)), numbers, host_QN)
            flat = {"token_ids": found.token_F, "loss_mask": found.trained_F}
            flat |= {name: one for name, one in (found.floats_F | found.masks_F).items() if one is not None}
            for place, key in enumerate(batch.keys):
                begin, end = found.bound_R[place], found.bound_R[place + 1]
                if isinstance(key, ExampleKey):
                    self.rows[row_of(step, key)] = {name: one[begin:end] for name, one in flat.items()}
            self.slope[step] += self._slope(batch, outputs)

        return take

    def _slope(self, batch: Batch, outputs: TokenOutputs) -> float:
        """The most that the loss of a batch moves where every log-probability moves by one."""
        with torch.enable_grad():
            logprob_N = outputs.logprob_N.detach().cpu().requires_grad_()
            made = self._loss(LossInputs(logprob_N, batch.example_N, batch.columns_N))
            (slope_N,) = torch.autograd.grad(made.loss_sum, logprob_N)
        return float(slope_N.double().abs().sum())

    def furthest(self, key: Row) -> tuple[int, float] | None:
        """The token of a row whose two log-probabilities are furthest apart, and how far."""
        columns = self.rows.get(key, {})
        if "inference_logprobs" not in columns or not columns["loss_mask"].any():
            return None
        distance_T = np.abs(columns["inference_logprobs"] - columns["trainer_logprobs"])
        token = int(np.nanargmax(distance_T))
        return token, float(distance_T[token])


def row_of(step: int, key: ExampleKey) -> Row:
    return Row(step, key.group, key.trajectory, key.part)


def compare_tokens(
    run: RecordedRun, i: int, seen: SeenTokens, found: Findings, *, within: float = 0.0
) -> None:
    """Token by token with the export, where there is one; log-probabilities may differ by `within`."""
    is_exported = False
    for sequence in exported_sequences(run.root, run.info, iteration=i, split=TRAIN):
        is_exported = True
        row = Row(*(getattr(sequence, name) or 0 for name in Row._fields))
        place = Place(row.group_idx, row.traj_idx, row.part, optim_step=row.optim_step)
        own = seen.rows.get(row)
        if own is None:
            found.compare(Stage.BATCHES, "a row of the token export", True, False, place)
        else:
            _compare_row(sequence, own, found, place, within)
    if not is_exported:
        for stage in (Stage.LOGPROBS, Stage.RATIOS, Stage.MASKS):
            found.leave_out(stage, "no token export of this iteration")


def _compare_row(sequence: TokenSequence, own: Columns, found: Findings, place: Place, within: float) -> None:
    turn_T = np.full(len(sequence), -1)
    for turn in sequence.turns:
        turn_T[turn.start : turn.end] = turn.step_idx
    near_T = _near(sequence, own, within)
    for stage, names in _COLUMNS.items():
        for name in names:
            recorded_T, replayed_T = sequence.get(name), own.get(name)
            if recorded_T is None or replayed_T is None or (within and name == "entropy"):
                continue  # left out of the export, or it does not apply
            at = place if stage is not Stage.EXAMPLES else place._replace(optim_step=None)
            if stage is Stage.MASKS and near_T is not None:
                replayed_T = np.where(near_T, recorded_T, replayed_T)
            options: dict[str, Any] = {"turn_T": turn_T, "within_T": 0.0}
            if stage is Stage.LOGPROBS:
                options["within_T"] = within
            elif stage is Stage.RATIOS:
                options["within_T"] = np.expm1(within) * np.abs(recorded_T)
            found.compare_columns(stage, name, recorded_T, replayed_T, at, **options)


def _near(sequence: TokenSequence, own: Columns, within: float) -> Array | None:
    """Which tokens may be on the other side of a bound of the loss, because their ratios are as good as
    equal."""
    recorded_T, replayed_T = sequence.get("trainer_logprobs"), own.get("trainer_logprobs")
    if not within or recorded_T is None or replayed_T is None or len(recorded_T) != len(replayed_T):
        return None
    near_T: Array = np.abs(recorded_T.astype(np.float64) - replayed_T) <= within
    return near_T
