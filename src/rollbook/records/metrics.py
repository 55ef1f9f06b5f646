"""metrics.jsonl: one line per call of `log_metrics`, all scalars of one iteration.

Written: `step` first, `progress/batch` (and `progress/done_frac` when the length of the run is known), the
metrics in the order they were given, `logged_at`, and `nonfinite` when a value was NaN or infinite.

Read: rows of ours and of Tinker's loops under one set of names, the documented ones. Several lines of one
step (an evaluation that finished late) can be merged; a step that goes down marks a resumed run whose
file was not rewound, and starts a new attempt.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rollbook.errors import UsageError
from rollbook.records.plain import Plain, encode, to_plain, utc_now
from rollbook.records.record import NONFINITE

# What other loops call a metric -> its documented name.
ALIASES = {
    "optim/entropy": "entropy",
    "optim/kl_sample_train_v1": "kl_sample_train_v1",
    "optim/kl_sample_train_v2": "kl_sample_train_v2",
    "env/all/ac_tokens_per_turn": "ac_tokens_per_turn",
    "learning_rate": "optim/lr",
    "progress": "progress/done_frac",
}
_STEP_KEYS = ("step", "progress/batch", "training_client/step")
_OWN_KEYS = frozenset({"step", "logged_at", NONFINITE})


def as_step(step: Any) -> int:
    """Whatever counts as a whole number: an int, a NumPy or torch integer, 3.0."""
    try:
        return operator.index(step)
    except TypeError:
        if isinstance(step, float) and step.is_integer():
            return int(step)
        raise UsageError(f"step must be a whole number, not {step!r}") from None


Row = dict[str, Plain]


def encode_metrics(metrics: Mapping[str, Any], step: int, total_iterations: int | None = None) -> bytes:
    step = as_step(step)
    row: Row = {"step": step, "progress/batch": step}
    if total_iterations:
        # Evaluations after the last iteration have a line of their own.
        row["progress/done_frac"] = min(1.0, (step + 1) / total_iterations)
    nonfinite: list[str] = []
    for key, value in metrics.items():
        # The common case, a finite float, without a call: this line runs for every metric of every step.
        if type(value) is float and type(key) is str and value - value == 0.0:
            row[key] = value
        else:
            row[str(key)] = to_plain(value, str(key), nonfinite)
    if "" in row:
        raise UsageError(f"a metric of step {step} has no name; give it one")
    if row["step"] != step or not _OWN_KEYS.isdisjoint(row.keys() - {"step"}):
        clash = sorted(_OWN_KEYS & {str(key) for key in metrics})
        raise UsageError(f"the metric names {', '.join(clash)} are taken; rename them")
    row["logged_at"] = utc_now()
    if nonfinite:
        row[NONFINITE] = nonfinite
    return encode(row)


def normalize(row: Row) -> Row:
    """Another system's row under the documented names.

    `step` is present, aliases are renamed, `time/x:total` is there as `time/x`.
    """
    step = step_of(row)
    plain: Row = {} if step is None else {"step": step}
    for key, value in row.items():
        name = ALIASES.get(key, key)
        if name == key or name not in row:
            plain[name] = value
        if key.startswith("time/") and key.endswith(":total"):
            plain.setdefault(key.removesuffix(":total"), value)
    if isinstance(odd := row.get(NONFINITE), list):
        plain[NONFINITE] = [ALIASES.get(name, name) for name in odd if isinstance(name, str)]
    return plain


def step_of(row: Row) -> int | None:
    for key in _STEP_KEYS:
        value = row.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return int(value)
    return None


def number_attempts(rows: Iterable[Row]) -> Iterator[tuple[int, Row]]:
    """Pair each row with its attempt, 1 for the first: a training step that goes down starts the next.

    Only lines that carry training progress count: an asynchronous evaluation reports an older step
    without anything having been resumed.
    """
    attempt, newest = 1, -1
    for row in rows:
        step = step_of(row)
        if step is not None and "progress/done_frac" in row:
            if step <= newest:
                attempt += 1
            newest = step
        yield attempt, row


def merge_by_step(numbered: Iterable[tuple[int, Row]]) -> list[Row]:
    """One row a step, in step order: lines of one step merged, later values and later attempts winning."""
    by_step: dict[int | None, tuple[int, Row]] = {}
    for attempt, row in numbered:
        step = step_of(row)
        known_attempt, merged = by_step.get(step, (attempt, {}))
        if attempt > known_attempt:
            merged = {}
        by_step[step] = (attempt, _merged(merged, row))
    return [row for _, (_, row) in sorted(by_step.items(), key=lambda item: (item[0] is None, item[0] or 0))]


def metric_names(row: Row) -> list[str]:
    """The keys of a row that are metrics."""
    return [key for key in row if key not in _OWN_KEYS]


def _merged(old: Row, new: Row) -> Row:
    nonfinite = [key for key in old.get(NONFINITE, ()) if key not in new] + list(new.get(NONFINITE, ()))
    merged = {**old, **new}
    if nonfinite:
        merged[NONFINITE] = nonfinite
    return merged
