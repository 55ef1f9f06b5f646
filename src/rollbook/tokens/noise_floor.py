"""How much a trainer disagrees with itself, as its metrics say: the measure for a mismatch with the sampler.

A run measures it every few iterations: the same tokens, forward twice in batches of another shape.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from rollbook.records.run_info import RunInfo
from rollbook.runs.metrics_view import Metrics

_PREFIX = "noise_floor/"


class NoiseFloor(msgspec.Struct, kw_only=True):
    iterations: list[int]  # where it was measured
    mismatch_kl: float | None = None  # mean
    largest: float | None = None  # the largest difference of two logprobs
    outside_share: float | None = None  # tokens with a ratio outside [0.9, 1.1]


def noise_floor(root: Path, info: RunInfo | None, iteration: int | None = None) -> NoiseFloor | None:
    """Over all measurements of a run, or the last one up to an iteration; None where there is none."""
    path = root / "metrics.jsonl"
    if not path.is_file():
        return None
    rows = [
        row
        for row in Metrics(path, info).by_step()
        if any(name.startswith(_PREFIX) for name in row) and row.get("step") is not None
    ]
    if iteration is not None:
        rows = [row for row in rows if row["step"] <= iteration][-1:]
    if not rows:
        return None

    def values(name: str) -> list[float]:
        found = (row.get(_PREFIX + name) for row in rows)
        return [float(value) for value in found if isinstance(value, int | float)]

    k3, outside, largest = values("k3"), values("outside"), values("max")
    return NoiseFloor(
        iterations=[int(row["step"]) for row in rows],
        mismatch_kl=sum(k3) / len(k3) if k3 else None,
        largest=max(largest, default=None),
        outside_share=sum(outside) / len(outside) if outside else None,
    )
