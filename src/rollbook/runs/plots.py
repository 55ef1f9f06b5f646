"""Curves as a picture, from the logs alone: at any time, also of a run that crashed.

A trainer's loss is drawn raw and smoothed; an RL run gets a panel for each of its headline metrics. Points
that are not finite are marked instead of left out, because they are what a person is looking for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollbook.errors import UsageError
from rollbook.runs.series import Curve, metric_curves, trainer_curves

_RL_PANELS = (
    "env/all/reward/total",
    "loss",
    "entropy",
    "kl_sample_train_v1",
    "kl_sample_train_v2",
    "optim/lr",
)
_MOST_PANELS = 12


def curves_of(directory: Path, names: Sequence[str] = ()) -> list[Curve]:
    """The curves of a run directory: those named, or the usual ones."""
    found = trainer_curves(directory)
    if found is not None:
        wanted = names or [name for name in ("loss", "eval_loss") if name in found]
    else:
        found = metric_curves(directory)
        wanted = names or [name for name in _RL_PANELS if name in found] or list(found)[:_MOST_PANELS]
    missing = [name for name in wanted if name not in found]
    if missing:
        raise UsageError(
            f"{directory} has no metric {missing[0]!r}; it has: {', '.join(sorted(found)) or 'none'}"
        )
    return [found[name] for name in wanted]


def smooth(values: Sequence[float]) -> list[float]:
    """A mean of the points around each, near ones counting more; the more points, the more of them.

    It looks to both sides: one that only looks back hangs behind a falling loss.
    """
    if not any(map(math.isfinite, values)):
        return list(values)
    weight = 1.8 * (1 / (1 + math.exp(-0.05 * len(values))) - 0.5)
    before = _decayed(values, weight)
    after = _decayed(values[::-1], weight)[::-1]
    smoothed = []
    for value, (left, left_count), (right, right_count) in zip(values, before, after, strict=True):
        own = (value, 1.0) if math.isfinite(value) else (0.0, 0.0)  # it is in both
        smoothed.append((left + right - own[0]) / (left_count + right_count - own[1]))
    return smoothed


def _decayed(values: Sequence[float], weight: float) -> list[tuple[float, float]]:
    """Up to each value: the sum of the finite ones, weighed by their distance, and that of the weights."""
    total, count, sums = 0.0, 0.0, []
    for value in values:
        total, count = total * weight, count * weight
        if math.isfinite(value):
            total, count = total + value, count + 1.0
        sums.append((total, count))
    return sums


def draw(curves: Sequence[Curve], path: Path, title: str) -> None:
    """One panel a curve, into a PNG (or whatever the ending of `path` says)."""
    if not curves:
        raise UsageError(f"{title}: nothing to draw yet")
    from matplotlib.figure import Figure  # not pyplot, whose windows are the caller's

    across = 1 if len(curves) == 1 else 2 if len(curves) <= 4 else 3
    down = math.ceil(len(curves) / across)
    figure = Figure(figsize=(6.4 * across, 3.6 * down))
    for place, axis in enumerate(figure.subplots(down, across, squeeze=False).flat):
        if place < len(curves):
            _draw_curve(axis, curves[place])
        else:
            axis.set_visible(False)
    figure.suptitle(title)
    figure.tight_layout()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: no picture could be written there: {error}") from error


def _draw_curve(axis: Any, curve: Curve) -> None:
    many = len(curve.values) > 200
    axis.plot(
        curve.steps, curve.values, color="#4878d0", alpha=0.4, marker=None if many else ".", label="logged"
    )
    axis.plot(curve.steps, smooth(curve.values), color="#1f4e9c", label="smoothed")
    odd = [step for step, value in zip(curve.steps, curve.values, strict=True) if not math.isfinite(value)]
    for number, step in enumerate(odd):
        axis.axvline(step, color="#d1495b", alpha=0.5, label="not finite" if number == 0 else None)
    axis.set_title(curve.name)
    axis.set_xlabel("step")
    axis.grid(alpha=0.25)
    axis.legend(fontsize="small")
