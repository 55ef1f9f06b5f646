"""`trainer_log.jsonl` as LLaMA-Factory writes it, and the files that the Hugging Face Trainer leaves.

One line per logged step: `current_steps`, `total_steps`, the values (`loss`, `eval_loss`, `lr`, `epoch`),
`percentage`, `elapsed_time`, `remaining_time`, `throughput`, `total_tokens`; their dashboards read it.
Better than there: a value that is not finite is null and named under `nonfinite`, never 0.0; times and
throughput count all sessions of a resumed run (`elapsed_s`). Points are kept in the log alone:
`trainer_state.json` is made from it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import orjson

from rollbook.records.atomic import write_atomic
from rollbook.records.jsonl import Line, read_lines
from rollbook.records.plain import to_plain
from rollbook.records.record import NONFINITE, decode_line

LOG, STATE = "trainer_log.jsonl", "trainer_state.json"
RESULTS, ALL_RESULTS, PICTURE = "train_results.json", "all_results.json", "training_loss.png"
_LF_NAMES = {"learning_rate": "lr", "rewards/accuracies": "accuracy"}
_TRAINER_NAMES = {ours: theirs for theirs, ours in _LF_NAMES.items()}
# Keys of a line that are not values of the step.
_PROGRESS = {
    "current_steps", "total_steps", "percentage", "elapsed_time", "remaining_time", "elapsed_s", "throughput",
    "total_tokens",
}  # fmt: skip


class TrainerLog:
    """Makes the lines; `append` writes them."""

    def __init__(
        self,
        append: Callable[[bytes], object],
        *,
        total_steps: int,
        step: int = 0,
        elapsed_s: float = 0.0,
        untimed_tokens: int = 0,
    ) -> None:
        """`step` and `elapsed_s` are those of the checkpoint that is resumed.

        `untimed_tokens` were seen in time that `elapsed_s` does not count.
        """
        self._append, self._total, self._first_step = append, total_steps, step
        self._elapsed_before, self._began = elapsed_s, time.monotonic()
        self._untimed_tokens = untimed_tokens

    @property
    def elapsed_s(self) -> float:
        """Over all sessions of the run."""
        return self._elapsed_before + time.monotonic() - self._began

    def add(self, step: int, values: Mapping[str, Any], tokens: int | None = None) -> list[str]:
        """Append a line; returns the names of the values that are not finite. `tokens` are all so far."""
        nonfinite: list[str] = []
        named = to_plain({_LF_NAMES.get(name, name): values[name] for name in values}, "", nonfinite)
        line = {"current_steps": step, "total_steps": self._total, **named, **self._progress(step, tokens)}
        if nonfinite:
            line[NONFINITE] = nonfinite
        self._append(orjson.dumps(line))
        return nonfinite

    def _progress(self, step: int, tokens: int | None) -> dict[str, Any]:
        elapsed, done_here = self.elapsed_s, step - self._first_step
        per_step = (elapsed - self._elapsed_before) / done_here if done_here > 0 else 0.0
        progress: dict[str, Any] = {
            "percentage": round(100 * step / self._total, 2) if self._total > 0 else 100.0,
            "elapsed_time": str(timedelta(seconds=int(elapsed))),
            "remaining_time": str(timedelta(seconds=int(per_step * (self._total - step)))),
            "elapsed_s": round(elapsed, 3),
        }
        if tokens:
            speed = (tokens - self._untimed_tokens) / max(elapsed, 1e-9)
            progress |= {"throughput": round(speed, 2), "total_tokens": tokens}
        return progress


def read_points(log: Path) -> Iterator[dict[str, Any]]:
    """The points of a log by the Trainer's names, as they stand in the `log_history` of its state."""
    for line in read_lines(log) if log.exists() else ():
        row = decode_line(log, line)
        values = {_TRAINER_NAMES.get(name, name): row[name] for name in row if name not in _PROGRESS}
        if "loss" in values or "eval_loss" in values:
            tokens = {"num_input_tokens_seen": row["total_tokens"]} if "total_tokens" in row else {}
            yield {"step": row["current_steps"], **values, **tokens}


def last_line(log: Path) -> dict[str, Any]:
    """The last line of a log; empty where there is none."""
    last: Line | None = None
    for line in read_lines(log) if log.exists() else ():
        last = line
    return {} if last is None else dict(decode_line(log, last))


def nonfinite_steps(points: Iterable[Mapping[str, Any]]) -> list[int]:
    """The steps of the points whose loss or gradient was not finite."""
    return [
        int(point["step"])
        for point in points
        if any(name in point and point[name] is None for name in ("loss", "grad_norm"))
    ]


def best_point(points: Iterable[Mapping[str, Any]]) -> tuple[int, float] | None:
    """Step and loss of the best evaluation."""
    found = [(point["eval_loss"], point["step"]) for point in points if point.get("eval_loss") is not None]
    if not found:
        return None
    loss, step = min(found)
    return step, loss


def trainer_state(
    log: Path,
    *,
    step: int,
    epoch: float,
    total_steps: int,
    epochs: float,
    tokens: int,
    flos: float,
    training: Mapping[str, Any],
    summary: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The keys of the Trainer's state; `training` holds settings it repeats, `summary` the results."""
    points = list(read_points(log))
    best = best_point(points)
    if summary:
        points.append({"step": step, **summary})
    return {
        "best_global_step": best[0] if best else None,
        "best_metric": best[1] if best else None,
        "best_model_checkpoint": str(log.parent / f"checkpoint-{best[0]}") if best else None,
        "epoch": epoch,
        "eval_steps": training.get("eval_steps"),
        "global_step": step,
        "is_hyper_param_search": False,
        "is_local_process_zero": True,
        "is_world_process_zero": True,
        "log_history": points,
        "logging_steps": training.get("logging_steps"),
        "max_steps": total_steps,
        "num_input_tokens_seen": tokens,
        "num_train_epochs": math.ceil(epochs),
        "save_steps": training.get("save_steps"),
        "stateful_callbacks": {},
        "total_flos": flos,
        "train_batch_size": training.get("per_device_train_batch_size"),
        "trial_name": None,
        "trial_params": None,
    }


def write_results(directory: Path, results: Mapping[str, Any]) -> None:
    """The two summaries of a run that reached its end; one of them with the last evaluation."""
    evaluation = {}
    for point in read_points(directory / LOG):
        if "eval_loss" in point:
            evaluation = {name: value for name, value in point.items() if name.startswith("eval_")}
    write_atomic(directory / RESULTS, pretty(results))
    write_atomic(directory / ALL_RESULTS, pretty({**results, **evaluation}))


def pretty(value: Mapping[str, Any]) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS) + b"\n"
