"""Records any Hugging Face Trainer or TRL run: by `callbacks=[Recorder()]`, or by `report_to: rollbook` after
`register()` was called, which `python -m rollbook.recorder SCRIPT ...` does for a script that is left alone.

Its output_dir becomes a run as others are (`Run`), with `trainer_log.jsonl` beside it, so `rollbook status`,
`history`, `plot` and `query` work on it. A loss that is not finite is null, named and shouted, never the 0.0
that the Trainer makes of it. Resuming takes the logs back to the checkpoint. Training never fails because
recording does: that costs one line of warning.
"""

from __future__ import annotations

import atexit
import functools
import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


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
            self._guarded(self._session.log_values, state, logs)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._session is not None:
            self._guarded(self._session.note_checkpoint, state.global_step)

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
        self._session = _open[directory] = self._open_session(directory, state, _kind(args))
        _watch_process()

    def _open_session(self, directory: Path, state: Any, kind: str) -> _Session:
        try:
            return _Session(directory, state, kind, self._artifacts)
        except Exception as error:
            self._warn(error)
            return _Session(directory, state, kind, None)  # the history may be what is wrong

    def _guarded(self, record: Callable[..., object], *arguments: Any) -> None:
        """Whatever goes wrong in recording is not the training's business."""
        try:
            record(*arguments)
        except Exception as error:
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            _print(f"this run is not fully recorded ({type(error).__name__}: {error}); training continues")


class _Session:
    """One call of `train()`, in the process that records it."""

    def __init__(self, directory: Path, state: Any, kind: str, artifacts: Path | None) -> None:
        from rollbook.records.trainer_log import LOG, TrainerLog, last_line
        from rollbook.runs.run import Run

        self.directory, self.state, self._path = directory, state, directory / LOG
        if not (directory / "run.json").exists():
            _set_aside(self._path)
        resume = _checkpoint_to_resume(directory, state.global_step)
        self._run = Run(directory, kind=kind, resume=resume, history=artifacts)
        last = last_line(self._path)
        self._first_tokens = state.num_input_tokens_seen
        self._tokens_before = int(last.get("total_tokens") or 0)
        self._num_tokens = 0.0  # by TRL's own count, which begins again with each session
        self._nonfinite: set[str] = set()  # what was not finite when it was last logged
        self._append = self._run.append_log(LOG).append
        self._log = TrainerLog(
            self._write,
            total_steps=state.max_steps,
            step=state.global_step,
            elapsed_s=float(last.get("elapsed_s") or 0.0),
            untimed_tokens=max(0, self._first_tokens - self._tokens_before),
        )

    def log_values(self, state: Any, logs: Mapping[str, Any]) -> None:
        values = dict(logs)
        norm = values.get("grad_norm")
        if values.get("loss") == 0.0 and isinstance(norm, float) and not math.isfinite(norm):
            values["loss"] = math.nan  # made by a filter that could not be turned off
        self._num_tokens = float(values.get("num_tokens") or self._num_tokens)
        tokens = state.num_input_tokens_seen or self._tokens_before + int(self._num_tokens)
        found = self._log.add(state.global_step, values, tokens)
        fresh = [name for name in found if name not in self._nonfinite]
        self._nonfinite = (self._nonfinite - values.keys()) | set(found)
        if fresh:
            self._shout(fresh)
        if self._is_open:
            self._run.log_metrics(values, step=state.global_step)

    def note_checkpoint(self, step: int) -> None:
        name = f"checkpoint-{step}"
        if self._is_open:
            self._run.record_checkpoint(name, batch=step, state_path=name)

    def end(self, status: str, reason: str | None = None) -> None:
        """Once: `_open` holds the sessions that have not ended."""
        if not self._is_open:
            return
        del _open[self.directory]
        if status == "failed":
            self._run.alert("training failed", str(reason), level="error", step=self.state.global_step)
        self._run.close(status, reason)

    @property
    def _is_open(self) -> bool:
        return _open.get(self.directory) is self

    def _write(self, line: bytes) -> None:
        if self._is_open:
            self._append(line)
            return
        from rollbook.records.jsonl import JsonlWriter

        writer = JsonlWriter(self._path)  # an evaluation after training: the run has ended
        try:
            writer.append(line)
        finally:
            writer.close()

    def _shout(self, names: list[str]) -> None:
        what = f"{', '.join(names)} not finite"
        _print(f"step {self.state.global_step} of {self.state.max_steps}: {what} ({self.directory})")
        level = "error" if any("loss" in name for name in names) else "warning"
        text = f"NaN or infinity: null in {self._path.name}, and listed there as nonfinite"
        if self._is_open:
            self._run.alert(what, text, level=level, step=self.state.global_step)


_open: dict[Path, _Session] = {}


def _checkpoint_to_resume(directory: Path, step: int) -> str | bool:
    """What `Run` is to go back to: the Trainer has decided already where it starts."""
    from rollbook.records.checkpoints import read_checkpoints
    from rollbook.runs.start import START_OVER

    if not (directory / "run.json").exists():
        return False
    known = {stored.record.name for stored in read_checkpoints(directory / "checkpoints.jsonl")}
    return f"checkpoint-{step}" if f"checkpoint-{step}" in known else START_OVER


@functools.cache
def _watch_process() -> None:
    """The Trainer has no event for a crash: an exception that ends the process, or its end, has to tell."""
    show = sys.excepthook

    def note(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if isinstance(error, KeyboardInterrupt):
            _end_all("interrupted", "stopped by SIGINT")
        else:
            _end_all("failed", f"{kind.__name__}: {error}")
        show(kind, error, trace)

    sys.excepthook = note
    atexit.register(_end_all, "failed", "the process ended before training did")


def _end_all(status: str, reason: str) -> None:
    for session in list(_open.values()):
        try:
            session.end(status, reason)
        except Exception as why:
            _print(f"how this run ended is not recorded ({type(why).__name__}: {why})")


def register() -> None:
    """Make `report_to="rollbook"` known to transformers; call it before the Trainer is made."""
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    INTEGRATION_TO_CALLBACK["rollbook"] = Recorder


def _kind(args: Any) -> str:
    """`sft` for TRL's SFTConfig, `grpo` for its GRPOConfig, `train` for plain TrainingArguments."""
    name = type(args).__name__.removesuffix("TrainingArguments").removesuffix("Config")
    return name.lower() or "train"


def _set_aside(path: Path) -> None:
    """The log of a run that was not recorded as one."""
    if path.exists() and path.stat().st_size:
        from rollbook.records.plain import utc_now

        path.rename(path.with_name(f"{path.stem}.{utc_now().replace(':', '')}{path.suffix}"))


def _print(text: str) -> None:
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
