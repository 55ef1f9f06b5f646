"""Records any Hugging Face Trainer or TRL run: by `callbacks=[Recorder()]`, or by `report_to: rollbook` after
`register()` was called, which `python -m rollbook.recorder SCRIPT ...` does for a script that is left alone.

In its output_dir the run gets `trainer_log.jsonl` with LLaMA-Factory's keys and `alerts.jsonl`, and its start
and end go into `artifacts/index.yaml`, so `rollbook status`, `history` and `plot` work on it. A loss that is
not finite is null, named and shouted, never the 0.0 that the Trainer makes of it. Resuming cuts the log back
to the checkpoint; time, throughput and what is left are right after it. Training never fails because
recording does: that costs one line of warning.

This file needs the standard library only and may be copied into another environment; the history, which
others append to at the same time, needs the package.
"""

from __future__ import annotations

import atexit
import functools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

LOG, ALERTS = "trainer_log.jsonl", "alerts.jsonl"
_NAMES = {"learning_rate": "lr", "rewards/accuracies": "accuracy"}  # as LLaMA-Factory calls them
_RESULTS = {  # what the history keeps of the last values, and its names for them
    "loss": "last_loss",
    "train_loss": "final_loss",
    "eval_loss": "eval_loss",
    "reward": "last_reward",
    "train_runtime": "train_runtime",
}


class Recorder:
    """A callback of the Trainer. It has the interface without the base class, which would import torch."""

    def __init__(self, artifacts: str | os.PathLike[str] | None = None) -> None:
        """`artifacts` holds the history; by default it is that of the commands."""
        named = artifacts or os.environ.get("ROLLBOOK_ARTIFACTS") or "artifacts"
        self._artifacts = Path(named).expanduser().absolute()
        self._session: _Session | None = None
        self._has_warned = False

    def __getattr__(self, name: str) -> Any:
        """The events that are not recorded, also those that later versions will have."""
        if name.startswith("on_"):
            return lambda *_, **__: None
        raise AttributeError(name)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._session = None
        self._guarded(self._begin, args, state)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if self._session is not None and logs:
            self._guarded(self._session.log, state, logs)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._session is not None:
            self._session.saved_steps.add(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._session is not None:
            stopped = f"stopped early, at step {state.global_step} of {state.max_steps}"
            reason = stopped if state.global_step < state.max_steps else None
            self._guarded(self._session.end, "completed", reason)

    def _begin(self, args: Any, state: Any) -> None:
        # On every rank: the filter makes the mean of the others, or 0.0, of a loss that is not finite. Under
        # fp16 it stays: there a step may overflow and be skipped, and all later losses would be NaN without.
        args.logging_nan_inf_filter = args.logging_nan_inf_filter and args.fp16
        directory = Path(args.output_dir).absolute()
        before = _open.get(directory)
        if not state.is_world_process_zero or (before is not None and before.state is state):
            return  # the latter was given twice, as a callback and by report_to
        if before is not None:
            self._guarded(before.end, "failed", "training began again before it had ended")
        session = self._session = _open[directory] = _Session(directory, state)
        _watch_process()
        self._guarded(session.prepare_files)
        if archive := os.environ.get("ROLLBOOK_RUN_DIR"):  # `rollbook run` has it in the history
            self._guarded((Path(archive) / "output_dir").write_text, f"{directory}\n")
        else:
            self._guarded(session.enter_history, self._artifacts, _kind(args))

    def _guarded(self, record: Callable[..., object], *arguments: Any) -> None:
        """Whatever goes wrong in recording is not the training's business."""
        try:
            record(*arguments)
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                _say(f"this run is not fully recorded ({type(error).__name__}: {error}); training goes on")


class _Session:
    """One call of `train()`, in the process that records it."""

    def __init__(self, directory: Path, state: Any) -> None:
        self.directory, self.state = directory, state
        self.saved_steps = {state.global_step}
        self._pid, self._began = os.getpid(), time.monotonic()
        self._first_step, self._first_tokens = state.global_step, state.num_input_tokens_seen
        self._elapsed_before, self._tokens_before = 0.0, 0  # of earlier sessions, by the log
        self._last: dict[str, Any] = {}
        self._nonfinite: set[str] = set()  # what was not finite when it was last logged
        self._end_history: Callable[..., None] | None = None

    def prepare_files(self) -> None:
        """Go on where the checkpoint was; or put the log of another run in this directory aside."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if self._first_step == 0:
            for name in (LOG, ALERTS):
                _set_aside(self.directory / name)
            return
        last = _cut_log(self.directory / LOG, self._first_step)
        if "elapsed_s" in last:
            self._elapsed_before = float(last["elapsed_s"])
            self._tokens_before = int(last.get("total_tokens") or 0)

    def enter_history(self, artifacts: Path, kind: str) -> None:
        try:
            from rollbook.runs.jobs.ledger import Ledger, RunEnd, RunStart, Status
            from rollbook.runs.saved_models import saved_models
        except ImportError as error:
            _say(f"not in the history, which needs the package rollbook here ({error}); the log is written")
            return
        ledger = Ledger(artifacts, lock_timeout_s=10.0)  # training waits for it
        run_id = ledger.start(
            RunStart(
                name=self.directory.name,
                kind=kind,
                command=list(sys.orig_argv),
                output_dir=str(self.directory),
                log=str(self.directory / LOG),
                resumed_from=f"checkpoint-{self._first_step}" if self._first_step else None,
            )
        )

        def end(status: str, reason: str | None, error: dict[str, Any] | None) -> None:
            ours = [model for model in saved_models(self.directory) if model.step in self.saved_steps]
            saved = next((model for model in reversed(ours) if model.complete), None)
            record = RunEnd(status=Status(status), reason=reason, error=error)
            record.duration_s = round(time.monotonic() - self._began, 3)
            record.metrics = {"steps": self.state.global_step}
            record.metrics |= {
                ours: self._last[name] for name, ours in _RESULTS.items() if name in self._last
            }
            if status == "interrupted":
                record.signal = "SIGINT"
            if saved is not None:
                record.checkpoint = {"path": str(saved.path), "step": saved.step}
            ledger.end(run_id, record)

        self._end_history = end

    def log(self, state: Any, logs: Mapping[str, Any]) -> None:
        values = {_NAMES.get(name, name): _plain(value) for name, value in logs.items()}
        nonfinite = [
            name for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)
        ]
        if values.get("loss") == 0.0 and "grad_norm" in nonfinite:  # a filter that could not be turned off
            nonfinite.insert(0, "loss")
        values |= dict.fromkeys(nonfinite)
        self._last |= values
        line = {"current_steps": state.global_step, "total_steps": state.max_steps, **values}
        line |= self._progress(state)
        if nonfinite:
            line["nonfinite"] = nonfinite
        fresh = [name for name in nonfinite if name not in self._nonfinite]
        self._nonfinite = (self._nonfinite - values.keys()) | set(nonfinite)
        try:
            _append(self.directory / LOG, line)
        finally:
            if fresh:
                self._shout(fresh)

    def end(self, status: str, reason: str | None = None, error: dict[str, Any] | None = None) -> None:
        """Once: `_open` holds the sessions that have not ended."""
        if _open.get(self.directory) is not self or os.getpid() != self._pid:
            return
        del _open[self.directory]
        if self._end_history is not None:
            self._end_history(status, reason, error)
        if status == "failed":
            self.alert("error", "training failed", _without_secrets(str(reason)))

    def alert(self, level: str, title: str, text: str) -> None:
        alert = {"raised_at": _now(), "level": level, "title": title, "text": text}
        _append(self.directory / ALERTS, {**alert, "step": self.state.global_step})

    def _shout(self, names: list[str]) -> None:
        what = f"{', '.join(names)} not finite"
        _say(f"step {self.state.global_step} of {self.state.max_steps}: {what} ({self.directory})")
        level = "error" if any("loss" in name for name in names) else "warning"
        self.alert(level, what, f"NaN or infinity: null in {LOG}, and listed there as nonfinite")

    def _progress(self, state: Any) -> dict[str, Any]:
        session = time.monotonic() - self._began
        elapsed = self._elapsed_before + session
        total, done_here = state.max_steps, state.global_step - self._first_step
        left = session / done_here * (total - state.global_step) if done_here > 0 else 0.0
        progress: dict[str, Any] = {
            "percentage": round(100 * state.global_step / total, 2) if total > 0 else 100.0,
            "elapsed_time": _clock(elapsed),
            "remaining_time": _clock(left),
            "elapsed_s": round(elapsed, 3),
        }
        # The Trainer's own count goes on after a resume; TRL's begins again with each session.
        here = (state.num_input_tokens_seen - self._first_tokens) or self._last.get("num_tokens") or 0
        if here and elapsed > 0:
            progress["throughput"] = round((self._tokens_before + here) / elapsed, 2)
            progress["total_tokens"] = state.num_input_tokens_seen or int(self._tokens_before + here)
        return progress


_open: dict[Path, _Session] = {}


@functools.cache
def _watch_process() -> None:
    """The Trainer has no event for a crash: an exception that ends the process, or its end, has to tell."""
    show = sys.excepthook

    def note(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if isinstance(error, KeyboardInterrupt):
            _end_all("interrupted", "stopped by SIGINT")
        else:
            _end_all("failed", f"{kind.__name__}: {error}", {"type": kind.__name__, "message": str(error)})
        show(kind, error, trace)

    sys.excepthook = note
    atexit.register(_end_all, "failed", "the process ended before training did")


def _end_all(status: str, reason: str, error: dict[str, Any] | None = None) -> None:
    for session in list(_open.values()):
        try:
            session.end(status, reason, error)
        except Exception as why:
            _say(f"how this run ended is not recorded ({type(why).__name__}: {why})")


def register() -> None:
    """Make `report_to="rollbook"` known to transformers; call it before the Trainer is made."""
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    INTEGRATION_TO_CALLBACK["rollbook"] = Recorder


def _kind(args: Any) -> str:
    """`sft` for TRL's SFTConfig, `grpo` for its GRPOConfig, `train` for plain TrainingArguments."""
    name = type(args).__name__.removesuffix("TrainingArguments").removesuffix("Config")
    return name.lower() or "train"


def _plain(value: Any) -> Any:
    """Scalars of torch and NumPy as numbers; what JSON does not know as text."""
    if hasattr(value, "item"):
        try:
            value = value.item()
        except (RuntimeError, TypeError, ValueError):  # not a scalar
            return str(value)
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def _append(path: Path, record: Mapping[str, Any]) -> None:
    """One line by one write; a line that does not fit on the disk leaves no half of itself."""
    data = json.dumps(record, allow_nan=False).encode() + b"\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        if os.write(descriptor, data) != len(data):
            os.ftruncate(descriptor, size)
            raise OSError(f"{path}: no space left")
    finally:
        os.close(descriptor)


def _cut_log(path: Path, step: int) -> dict[str, Any]:
    """Drop the lines of later steps, which will be done again, and a torn last one; returns the last kept."""
    if not path.exists():
        return {}
    data = path.read_bytes()
    kept, last = [], dict[str, Any]()
    for line in data.split(b"\n")[:-1]:
        try:
            row = json.loads(line)
        except ValueError:
            row = {}  # not for us to delete
        if isinstance(row, dict) and row.get("current_steps", 0) <= step:
            kept.append(line + b"\n")
            last = row or last
    if (text := b"".join(kept)) != data:
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        aside.write_bytes(text)
        aside.replace(path)
    return last


def _set_aside(path: Path) -> None:
    if path.exists() and path.stat().st_size:
        path.rename(path.with_name(f"{path.stem}.{_now().replace(':', '')}{path.suffix}"))


def _without_secrets(text: str) -> str:
    try:
        from rollbook.records.redact import redact_text
    except ImportError:
        return text
    return redact_text(text)


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=int(seconds)))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _say(text: str) -> None:
    sys.stderr.write(f"[rollbook] {text}\n")


def main() -> None:
    """`python -m rollbook.recorder SCRIPT ARGUMENTS` (or `-m MODULE ARGUMENTS`), as Python runs them."""
    import runpy

    del sys.argv[0]
    if sys.argv in ([], ["-m"]):
        sys.exit("usage: python -m rollbook.recorder (SCRIPT | -m MODULE) [ARGUMENTS]")
    register()
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).absolute().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
