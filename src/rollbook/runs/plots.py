"""Curves as a picture, from the logs alone: at any time, also of a run that crashed.

A trainer's loss is drawn raw and smoothed; an RL run gets a panel for each of its headline metrics. Points
that are not finite are marked instead of left out, because they are what a person is looking for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rollbook.errors import UsageError
from rollbook.records.jsonl import read_lines
from rollbook.records.metrics import metric_names
from rollbook.records.record import decode_json, decode_line
from rollbook.runs.reader import open_run
from rollbook.runs.status import newest_trainer_state

_RL_PANELS = (
    "env/all/reward/total",
    "loss",
    "entropy",
    "kl_sample_train_v1",
    "kl_sample_train_v2",
    "optim/lr",
)
_MOST_PANELS = 12


class Curve(NamedTuple):
    name: str
    steps: list[int]
    values: list[float]  # NaN where the log says the value was not finite


def curves_of(directory: Path, names: Sequence[str] = ()) -> list[Curve]:
    """The curves of a run directory: those named, or the usual ones."""
    if (directory / "trainer_log.jsonl").exists():
        found = _trainer_curves(directory / "trainer_log.jsonl")
        wanted = names or [name for name in ("loss", "eval_loss") if name in found]
    elif (state := newest_trainer_state(directory)) is not None:
        found = _history_curves(state)
        wanted = names or [name for name in ("loss", "eval_loss") if name in found]
    else:
        found = _metric_curves(directory)
        wanted = names or [name for name in _RL_PANELS if name in found] or list(found)[:_MOST_PANELS]
    missing = [name for name in wanted if name not in found]
    if missing:
        raise UsageError(
            f"{directory} has no metric {missing[0]!r}; it has: {', '.join(sorted(found)) or 'none'}"
        )
    return [found[name] for name in wanted]


def smooth(values: Sequence[float]) -> list[float]:
    """An exponential mean whose weight grows with the number of points, as trainers draw it."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return list(values)
    weight = 1.8 * (1 / (1 + math.exp(-0.05 * len(values))) - 0.5)
    last, smoothed = finite[0], []
    for value in values:
        if math.isfinite(value):
            last = weight * last + (1 - weight) * value
        smoothed.append(last)
    return smoothed


def draw(curves: Sequence[Curve], path: Path, title: str) -> None:
    """One panel a curve, into a PNG (or whatever the ending of `path` says)."""
    if not curves:
        raise UsageError(f"{title}: nothing to draw yet")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    across = 1 if len(curves) == 1 else 2 if len(curves) <= 4 else 3
    down = math.ceil(len(curves) / across)
    figure, axes = pyplot.subplots(down, across, figsize=(6.4 * across, 3.6 * down), squeeze=False)
    for place, axis in enumerate(axes.flat):
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
    finally:
        pyplot.close(figure)


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


def _trainer_curves(path: Path) -> dict[str, Curve]:
    points: dict[str, dict[int, float]] = {}
    for line in read_lines(path):
        row = decode_line(path, line)
        step = next((row[key] for key in ("current_steps", "step", "global_step") if key in row), None)
        if not isinstance(step, int):
            continue
        for name, value in _numbers(row):
            # A resumed log may repeat steps: the later line is the one that counts.
            points.setdefault(name, {})[step] = value
    return {name: Curve(name, *_sorted(values)) for name, values in points.items()}


def _history_curves(path: Path) -> dict[str, Curve]:
    """The points a trainer keeps in its own state."""
    points: dict[str, dict[int, float]] = {}
    state = decode_json(path.read_bytes())
    for row in state.get("log_history") or [] if isinstance(state, dict) else []:
        if isinstance(step := row.get("step"), int):
            for name, value in _numbers({key: value for key, value in row.items() if key != "step"}):
                points.setdefault(name, {})[step] = value
    return {name: Curve(name, *_sorted(values)) for name, values in points.items()}


def _metric_curves(directory: Path) -> dict[str, Curve]:
    points: dict[str, dict[int, float]] = {}
    for row in open_run(directory).metrics.by_step():
        if isinstance(step := row.get("step"), int):
            for name, value in _numbers({name: row[name] for name in metric_names(row)} | _nonfinite(row)):
                points.setdefault(name, {})[step] = value
    return {name: Curve(name, *_sorted(values)) for name, values in points.items()}


def _nonfinite(row: dict[str, Any]) -> dict[str, Any]:
    return {"nonfinite": row["nonfinite"]} if row.get("nonfinite") else {}


def _numbers(row: dict[str, Any]) -> list[tuple[str, float]]:
    odd = row.get("nonfinite") or ()
    numbers = [
        (name, float(value))
        for name, value in row.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    return [*numbers, *((name, math.nan) for name in odd)]


def _sorted(values: dict[int, float]) -> tuple[list[int], list[float]]:
    steps = sorted(values)
    return steps, [values[step] for step in steps]
