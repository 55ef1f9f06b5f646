"""The numbers of a step that are about its tokens, each with the way in which it is put together.

A metric names its kind: mean over all trained tokens, smallest, largest. Sums are made in float64 over all
micro-batches and processes and divided once, so how a step is cut changes none of them.

    d = log mu - log pi of a trained token, mu when it was sampled and pi now
    entropy            mean over tokens of the entropy of the whole distribution, at the sampling temperature
    entropy_sampled    mean of -log mu: an estimate of the same from the sampled tokens
    kl_sample_train_v1 mean of d; _v2 mean of d^2 / 2; _v3 mean of exp(-d) + d - 1, which is never negative
    logprob_diff       mean, largest (_max), share over 1 (_over_1) and over 5 (_over_5) of |d|
    ratio              mean, _min and _max of the ratio that the loss used
    ess                (sum of ratios)^2 / (tokens x sum of squared ratios): 1 if all are equal
    kept, clamped      shares of tokens; clipped_high, clipped_low: by which bound others were left out
Any other fact of a loss is given as its mean over tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollbook.train.losses import LossOutput, Reason
from rollbook.train.losses.base import LOG_RATIO_CAP
from rollbook.train.processes import Processes
from rollbook.train.token_math import TokenOutputs

_LEFT_OUT = {"clipped_high": Reason.CLIPPED_HIGH, "clipped_low": Reason.CLIPPED_LOW}
RATIO_SQUARED = "ratio squared"  # only there to make `ess` of


class Kind(Enum):
    """How the values of single tokens become one number."""

    MEAN = "mean"
    MIN = "min"
    MAX = "max"


class Measured(NamedTuple):
    kind: Kind
    value_N: Tensor


def token_metrics(
    columns_N: Mapping[str, Tensor], outputs: TokenOutputs, loss: LossOutput
) -> dict[str, Measured]:
    """Everything that is measured, token by token."""
    values = _facts(loss.facts_N)
    if outputs.entropy_N is not None:
        values["entropy"] = Measured(Kind.MEAN, outputs.entropy_N)
    sampled_N = columns_N.get("sampled_logprob")
    if sampled_N is not None:
        values |= _mismatch(sampled_N, outputs.logprob_N.detach())
    for name, measured in values.items():
        if measured.value_N.shape != outputs.logprob_N.shape:
            shape = tuple(measured.value_N.shape)
            raise ValueError(
                f"the fact {name!r} must have one value per trained token, not the shape {shape}"
            )
    return values


def _facts(facts_N: Mapping[str, Tensor]) -> dict[str, Measured]:
    values = {name: Measured(Kind.MEAN, fact_N) for name, fact_N in facts_N.items() if name != "reason"}
    if "reason" in facts_N:
        for name, reason in _LEFT_OUT.items():
            values[name] = Measured(Kind.MEAN, facts_N["reason"] == reason)
    if "ratio" in facts_N:
        ratio_N = facts_N["ratio"]
        values["ratio_min"] = Measured(Kind.MIN, ratio_N)
        values["ratio_max"] = Measured(Kind.MAX, ratio_N)
        values[RATIO_SQUARED] = Measured(Kind.MEAN, ratio_N.double().square())
    return values


def _mismatch(sampled_N: Tensor, logprob_N: Tensor) -> dict[str, Measured]:
    d_N = sampled_N - logprob_N
    capped_N, size_N = d_N.clamp(-LOG_RATIO_CAP, LOG_RATIO_CAP).double(), d_N.abs()
    return {
        "entropy_sampled": Measured(Kind.MEAN, -sampled_N),
        "kl_sample_train_v1": Measured(Kind.MEAN, d_N),
        "kl_sample_train_v2": Measured(Kind.MEAN, d_N.double().square() / 2),
        "kl_sample_train_v3": Measured(Kind.MEAN, torch.expm1(-capped_N) + capped_N),
        "logprob_diff": Measured(Kind.MEAN, size_N),
        "logprob_diff_max": Measured(Kind.MAX, size_N),
        "logprob_diff_over_1": Measured(Kind.MEAN, size_N > 1),
        "logprob_diff_over_5": Measured(Kind.MEAN, size_N > 5),
    }


class Sums(NamedTuple):
    """The metrics of so many tokens before they are divided, so that those of several steps can be joined."""

    tokens: float
    kinds: Mapping[str, Kind]
    values: Mapping[str, float]  # the sum over tokens, or their smallest or largest value

    def means(self) -> dict[str, float]:
        """Every metric; NaN where there are no tokens."""
        tokens = self.tokens or math.nan
        found = {
            name: value / tokens if self.kinds[name] is Kind.MEAN else value
            for name, value in self.values.items()
        }
        squared = found.pop(RATIO_SQUARED, None)
        if squared is not None:
            found["ess"] = found["ratio"] ** 2 / squared if squared else math.nan
        return found


def joined(steps: Sequence[Sums]) -> Sums:
    """The tokens of several steps together; one that was trained twice counts twice."""
    kinds = steps[0].kinds
    for step in steps:
        _check_same(kinds, step.kinds)
    values = {}
    for name, kind in kinds.items():
        together = np.array([step.values[name] for step in steps])  # whose extremes keep a NaN
        values[name] = float(_TOGETHER[kind](together))
    return Sums(sum(step.tokens for step in steps), kinds, values)


_TOGETHER: dict[Kind, Callable[[Any], Any]] = {Kind.MEAN: np.sum, Kind.MIN: np.min, Kind.MAX: np.max}


def _check_same(before: Mapping[str, Kind], now: Mapping[str, Kind]) -> None:
    if before != now:
        raise ValueError(f"a loss must report the same facts for every batch, not {[*before]} and {[*now]}")


class Tally:
    """Adds up the metrics of a step over its micro-batches, then over all processes."""

    def __init__(self) -> None:
        self._kinds: dict[str, Kind] = {}
        self._sums: Tensor | None = None
        self._extremes: Tensor | None = None  # largest values; smallest ones with their sign turned

    def add(self, loss_sum: Tensor, metrics: Mapping[str, Measured]) -> None:
        kinds = {name: measured.kind for name, measured in metrics.items()}
        if self._sums is not None:
            _check_same(self._kinds, kinds)
        means = [
            measured.value_N.double().sum() for measured in metrics.values() if measured.kind is Kind.MEAN
        ]
        extremes = [_largest(measured) for measured in metrics.values() if measured.kind is not Kind.MEAN]
        sums = torch.stack([loss_sum.detach().double(), *means])
        self._add(kinds, sums, torch.stack(extremes) if extremes else None)

    def add_all(self, other: Tally) -> None:
        """What another one has added up: of the next process, where one computes for several."""
        if other._sums is not None:
            self._add(other._kinds, other._sums, other._extremes)

    def _add(self, kinds: dict[str, Kind], sums: Tensor, extremes: Tensor | None) -> None:
        self._kinds = kinds
        self._sums = sums if self._sums is None else self._sums + sums
        if extremes is not None:
            self._extremes = extremes if self._extremes is None else torch.maximum(self._extremes, extremes)

    def total(self, processes: Processes, tokens: float) -> tuple[float, Sums]:
        """The sum of the loss, and those of every metric, over all processes. All of them call it, with the
        same names."""
        if self._sums is None:
            raise ValueError("nothing was added")
        loss, *sums = processes.sum_all(self._sums).tolist()
        extremes = [] if self._extremes is None else processes.largest(self._extremes).tolist()
        values: dict[str, float] = {}
        for name, kind in self._kinds.items():
            if kind is Kind.MEAN:
                values[name] = sums.pop(0)
            else:
                values[name] = extremes.pop(0) * (-1 if kind is Kind.MIN else 1)
        return loss, Sums(tokens, self._kinds, values)


def _largest(measured: Measured) -> Tensor:
    value_N = measured.value_N.double()
    if not len(value_N):
        return value_N.new_tensor(-math.inf)
    return value_N.amax() if measured.kind is Kind.MAX else -value_N.amin()
