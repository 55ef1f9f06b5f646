"""Sums over tokens, of all of them and by a key: environment, turn, position, iteration, process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np

from rollbook.tokens.chunks import Array, Chunk

Key = str | int


class Band(NamedTuple):
    """The importance ratios that count as equal."""

    low: float = 0.9
    high: float = 1.1


class Totals(msgspec.Struct, kw_only=True):
    """Some tokens together. None where none of them says; shares are of the tokens that do."""

    tokens: int
    masked: int | None = None
    masked_share: float | None = None
    masked_high_share: float | None = None
    masked_low_share: float | None = None
    masked_pull_share: float | None = None  # of the sum of |advantage| x ratio, what the masks left out
    outside_share: float | None = None  # tokens with an importance ratio outside the band
    mismatch_kl: float | None = None  # mean
    mismatch_kl_max: float | None = None
    entropy: float | None = None  # mean
    inference_logprob: float | None = None  # mean
    trainer_logprob: float | None = None  # mean
    nonfinite: int = 0  # tokens with a logprob, ratio or KL that is not finite; they are in no mean


class Row(Totals, kw_only=True):
    """Those with one value of a key."""

    key: Key


# A sum and the number of tokens that are in it.
_MEANS = ("mismatch_kl", "entropy", "inference_logprob", "trainer_logprob", "outside")
_FACTS = ("masked", "is_masked_high", "is_masked_low", "pull_masked")
_FIELDS = (
    "tokens", "nonfinite", "known", *_FACTS, "pull", *_MEANS, *(f"with {name}" for name in _MEANS),
)  # fmt: skip


def sums_of(chunk: Chunk, band: Band) -> Array:
    """For each token what it adds to each of the fields, and its KL for the largest one."""
    ratio_N, kl_N = chunk.ratio_N(), chunk.floats("mismatch_kl")
    known_N, masked_N = chunk.has("is_masked"), chunk.flags("is_masked")
    trainer_N, sampled_N = chunk.floats("trainer_logprobs"), chunk.floats("inference_logprobs")
    pull_N = np.where(known_N, chunk.pull_N(), 0.0)
    values = {
        "tokens": np.ones(len(chunk)),
        "nonfinite": _nonfinite(chunk),
        "known": known_N,
        "masked": masked_N,
        "is_masked_high": chunk.flags("is_masked_high"),
        "is_masked_low": chunk.flags("is_masked_low"),
        "pull": pull_N,
        "pull_masked": np.where(masked_N, pull_N, 0.0),
        "outside": np.where(np.isnan(ratio_N), np.nan, (ratio_N < band.low) | (ratio_N > band.high)),
        "mismatch_kl": kl_N,
        "entropy": chunk.floats("entropy"),
        "inference_logprob": sampled_N,
        "trainer_logprob": trainer_N,
    }
    for name in _MEANS:
        is_finite_N = np.isfinite(values[name])
        values[f"with {name}"] = is_finite_N
        values[name] = np.where(is_finite_N, values[name], 0.0)
    return np.stack([values[name].astype(np.float64) for name in _FIELDS])


def _nonfinite(chunk: Chunk) -> Array:
    """The tokens with a value that was not finite, not those without a value."""
    found_N = np.zeros(len(chunk), np.bool_)
    for name in ("inference_logprobs", "trainer_logprobs", "mismatch_kl", "importance_ratio"):
        found_N |= chunk.known(name) & ~np.isfinite(chunk.floats(name))
    return found_N


UNKNOWN = -1  # the key of tokens for which nobody says one


class Breakdown:
    """Sums by a key."""

    def __init__(self) -> None:
        self._sums: dict[int, Array] = {}
        self._largest: dict[int, float] = {}

    def add(self, keys_N: Array, sums_FN: Array, kl_N: Array) -> None:
        """`sums_FN` is what `sums_of` says of the tokens."""
        finite_N = np.where(np.isfinite(kl_N), kl_N, -np.inf)
        if (np.diff(keys_N) < 0).any():  # most keys are in order, or the same for all
            order_N = np.argsort(keys_N, kind="stable")
            keys_N, sums_FN, finite_N = keys_N[order_N], sums_FN[:, order_N], finite_N[order_N]
        keys, start_K = np.unique(keys_N, return_index=True)
        added_FK = np.add.reduceat(sums_FN, start_K, axis=1)
        largest_K = np.maximum.reduceat(finite_N, start_K)
        for number, key in enumerate(keys.tolist()):
            self._sums[key] = self._sums.get(key, 0.0) + added_FK[:, number]
            self._largest[key] = max(self._largest.get(key, -np.inf), float(largest_K[number]))

    def rows(self, label: Callable[[int], Key] = int) -> list[Row]:
        """In the order of the keys, without `UNKNOWN`."""
        return [
            Row(key=label(key), **_totals(self._sums[key], self._largest[key]))
            for key in sorted(self._sums)
            if key != UNKNOWN
        ]

    def total(self) -> Totals:
        if not self._sums:
            return Totals(tokens=0)
        return Totals(**_totals(np.sum(list(self._sums.values()), axis=0), max(self._largest.values())))


def _totals(sums: Array, largest: float) -> dict[str, Any]:
    value = dict(zip(_FIELDS, sums.tolist(), strict=True))

    def share(name: str, of: str) -> float | None:
        return value[name] / value[of] if value[of] else None

    has_masks = value["known"] > 0
    return {
        "tokens": int(value["tokens"]),
        "nonfinite": int(value["nonfinite"]),
        "masked": int(value["masked"]) if has_masks else None,
        "masked_share": share("masked", "known"),
        "masked_high_share": share("is_masked_high", "known"),
        "masked_low_share": share("is_masked_low", "known"),
        "masked_pull_share": share("pull_masked", "pull"),
        "outside_share": share("outside", "with outside"),
        "mismatch_kl": share("mismatch_kl", "with mismatch_kl"),
        "mismatch_kl_max": largest if np.isfinite(largest) else None,
        "entropy": share("entropy", "with entropy"),
        "inference_logprob": share("inference_logprob", "with inference_logprob"),
        "trainer_logprob": share("trainer_logprob", "with trainer_logprob"),
    }


_FACTOR = 4
ROW_POSITIONS, REPLY_POSITIONS = 16, 1  # where the second range begins: 0-15, 16-63, ... or 0, 1-3, 4-15, ...


def position_buckets(offset_N: Array, second: int = ROW_POSITIONS) -> Array:
    """Each position as the first one of its range; one that is not known stays so."""
    edges = [0, second]
    while edges[-1] <= (offset_N.max() if len(offset_N) else 0):
        edges.append(edges[-1] * _FACTOR)
    first_N = np.array(edges)[np.searchsorted(edges, offset_N, side="right") - 1]
    return np.where(offset_N < 0, UNKNOWN, first_N)


def position_label(first: int, second: int = ROW_POSITIONS) -> str:
    last = max(first * _FACTOR, second) - 1
    return str(first) if first == last else f"{first}-{last}"
