"""The files of a training run as LLaMA-Factory and the Hugging Face Trainer write them, kept current.

`trainer_log.jsonl` gets a line at every logged step, `trainer_state.json` is replaced with it, the picture is
drawn while the run goes on: a killed run leaves all of them. Their dashboards read ours. What is better than
there: a loss that is not finite is null and named, never 0.0; time, throughput and what is left count all
sessions of a resumed run; resuming cuts the log back to the checkpoint, so no step stands in it twice.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import orjson

from rollbook.errors import RollbookError
from rollbook.records.alerts import Alert, Level
from rollbook.records.atomic import write_atomic
from rollbook.records.jsonl import JsonlWriter, every_ms, read_lines
from rollbook.records.plain import utc_now
from rollbook.records.record import NONFINITE

LOG, STATE, RESULTS, ALL_RESULTS = (
    "trainer_log.jsonl",
    "trainer_state.json",
    "train_results.json",
    "all_results.json",
)
PICTURE, ALERTS = "training_loss.png", "alerts.jsonl"
_DRAW_EVERY_S = 30.0
_OWN = "rollbook"


class TrainerFiles:
    """The one writer of these files. Use as a context manager."""

    def __init__(self, directory: Path, state: dict[str, Any]) -> None:
        """`state` is that of a new run (`new_state`) or of the checkpoint that is resumed."""
        self.directory = directory
        self.state = state
        self._elapsed_before = float(own_state(state)["elapsed_s"])
        self._steps_before = int(state["global_step"])
        self._started = time.monotonic()
        self._drawn = 0.0
        directory.mkdir(parents=True, exist_ok=True)
        cut_log(directory / LOG, self._steps_before)
        self._log = JsonlWriter(directory / LOG, sync=every_ms(200))
        self._alerts = JsonlWriter(directory / ALERTS, sync=every_ms(200))

    @property
    def elapsed_s(self) -> float:
        """Over all sessions of the run."""
        return self._elapsed_before + time.monotonic() - self._started

    def train_point(self, step: int, values: Mapping[str, float | int], tokens: int) -> None:
        """One logged step: loss, learning_rate, grad_norm, epoch and what else there is."""
        self._add_point({"step": step, **values}, tokens)
        line = {"loss": values.get("loss"), "lr": values.get("learning_rate"), "epoch": values.get("epoch")}
        extra = {key: value for key, value in values.items() if key not in ("loss", "learning_rate", "epoch")}
        self._line(step, line | extra, tokens)
        self.write_state()
        if time.monotonic() - self._drawn > _DRAW_EVERY_S:
            self.draw()

    def eval_point(self, step: int, values: Mapping[str, float | int], tokens: int) -> None:
        self._add_point({"step": step, **values}, tokens)
        self._line(step, {"eval_loss": values["eval_loss"], "epoch": values.get("epoch")}, tokens)
        self.write_state()

    def before_checkpoint(self) -> None:
        """What a checkpoint is about to say is true, and lies on the disk before it does."""
        self._log.sync()
        self.write_state()

    def alert(self, title: str, text: str, step: int) -> None:
        alert = Alert(raised_at=utc_now(), level=Level.ERROR, title=title, text=text, step=step)
        self._alerts.append(alert.encode())

    def write_state(self) -> None:
        own_state(self.state)["elapsed_s"] = self.elapsed_s
        write_atomic(self.directory / STATE, state_bytes(self.state), durable=False)

    def finish(self, results: Mapping[str, float | int]) -> None:
        """The summary of a run that reached its end."""
        self._add_point({"step": self.state["global_step"], **results}, None)
        tokens = int(self.state["num_input_tokens_seen"])
        self._line(self.state["global_step"], {"epoch": results.get("epoch")}, tokens)
        self.write_state()
        for name in (RESULTS, ALL_RESULTS):
            write_atomic(
                self.directory / name,
                _pretty(dict(results) | (_last_eval(self.state) if name == ALL_RESULTS else {})),
            )
        self.draw()

    def draw(self) -> None:
        from rollbook.runs.plots import curves_of, draw

        self._drawn = time.monotonic()
        try:
            self._log.sync()
            draw(curves_of(self.directory), self.directory / PICTURE, self.directory.name)
        except RollbookError:  # no finite point yet
            return

    def __enter__(self) -> TrainerFiles:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.write_state()
            self.draw()
        finally:
            self._log.close()
            self._alerts.close()

    def _add_point(self, point: dict[str, Any], tokens: int | None) -> None:
        plain, nonfinite = _finite(point)
        self.state["global_step"] = point["step"]
        self.state["epoch"] = point.get("epoch", self.state.get("epoch"))
        if tokens is not None:
            self.state["num_input_tokens_seen"] = plain["num_input_tokens_seen"] = tokens
        self.state["log_history"].append(plain | ({NONFINITE: nonfinite} if nonfinite else {}))

    def _line(self, step: int, values: Mapping[str, Any], tokens: int) -> None:
        total = int(self.state["max_steps"])
        elapsed, done_here = self.elapsed_s, step - self._steps_before
        session = elapsed - self._elapsed_before
        left = (total - step) * session / done_here if done_here > 0 else None
        plain, nonfinite = _finite({key: value for key, value in values.items() if value is not None})
        line = {
            "current_steps": step,
            "total_steps": total,
            **plain,
            "percentage": round(100 * step / total, 2) if total else 100.0,
            "elapsed_time": _clock(elapsed),
            "remaining_time": _clock(left or 0.0),
            "throughput": round(tokens / elapsed, 2) if elapsed > 0 else 0.0,
            "total_tokens": tokens,
        }
        self._log.append(orjson.dumps(line | ({NONFINITE: nonfinite} if nonfinite else {})))


class NoFiles:
    """The same, for the processes that write nothing."""

    elapsed_s = 1.0

    def train_point(self, step: int, values: Mapping[str, float | int], tokens: int) -> None:
        return

    def eval_point(self, step: int, values: Mapping[str, float | int], tokens: int) -> None:
        return

    def before_checkpoint(self) -> None:
        return

    def alert(self, title: str, text: str, step: int) -> None:
        return

    def finish(self, results: Mapping[str, float | int]) -> None:
        return

    def __enter__(self) -> NoFiles:
        return self

    def __exit__(self, *_: object) -> None:
        return


def new_state(total_steps: int, *, epochs: float, settings: Any) -> dict[str, Any]:
    """The keys of the Hugging Face Trainer's state."""
    return {
        "best_global_step": None,
        "best_metric": None,
        "best_model_checkpoint": None,
        "epoch": 0.0,
        "eval_steps": settings.eval_steps,
        "global_step": 0,
        "is_hyper_param_search": False,
        "is_local_process_zero": True,
        "is_world_process_zero": True,
        "log_history": [],
        "logging_steps": settings.logging_steps,
        "max_steps": total_steps,
        "num_input_tokens_seen": 0,
        "num_train_epochs": math.ceil(epochs),
        "save_steps": settings.save_steps,
        "stateful_callbacks": {
            _OWN: {"elapsed_s": 0.0, "loss_sum": 0.0, "nonfinite_steps": 0, "window": {}, "made_from": {}}
        },
        "total_flos": 0.0,
        "train_batch_size": settings.per_device_train_batch_size,
        "trial_name": None,
        "trial_params": None,
    }


def own_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """What only this trainer keeps; in the one place where the Trainer's own state takes further keys."""
    own: dict[str, Any] = state["stateful_callbacks"][_OWN]
    return own


def state_bytes(state: Mapping[str, Any]) -> bytes:
    return _pretty(state)


def cut_log(path: Path, step: int) -> None:
    """Without the lines of steps after `step`, and of the end, which are about to be written again."""
    if not path.exists():
        return
    kept = []
    for line in read_lines(path):
        row = orjson.loads(line.data)
        if int(row.get("current_steps", 0)) <= step and ("loss" in row or "eval_loss" in row):
            kept.append(line.data + b"\n")
    if path.stat().st_size != sum(map(len, kept)):
        write_atomic(path, b"".join(kept))


def _last_eval(state: Mapping[str, Any]) -> dict[str, Any]:
    for point in reversed(state["log_history"]):
        if "eval_loss" in point:
            return {key: value for key, value in point.items() if key.startswith("eval_")}
    return {}


def _finite(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    nonfinite = [
        key for key, value in values.items() if isinstance(value, float) and not math.isfinite(value)
    ]
    return {key: None if key in nonfinite else value for key, value in values.items()}, nonfinite


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=int(seconds)))


def _pretty(value: Mapping[str, Any]) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS) + b"\n"
