"""The state of a run, from the files it leaves: step, percent, ETA, loss and trend, last checkpoint.

Works on a run of any kind while it is written, and after it was killed: an RL run's `metrics.jsonl`, a
trainer's `trainer_log.jsonl`, a collection's `*_progress.json`. Only the end of a log is read.
"""

from __future__ import annotations

import re
import socket
import time
from pathlib import Path
from typing import Any

import msgspec

from rollbook.records.checkpoints import flaw, read_checkpoints
from rollbook.records.layout import RunFiles
from rollbook.records.locks import LockHolder, is_held, noted_holder
from rollbook.records.metrics import normalize, step_of
from rollbook.records.plain import unix_time
from rollbook.records.progress import Progress, read_progress
from rollbook.records.run_info import RunInfo
from rollbook.runs.saved_models import saved_models
from rollbook.runs.series import last_rows, newest_trainer_state, read_trainer_state, trainer_step

_TREND_POINTS = 20
_SILENT_S = 60.0  # a collector writes every second
_CLOCK_SLACK_S = 2.0
_FLAT = 0.01  # a relative change below this is no trend
# The first that a run has: the loss of a run that has rewards says little.
_REWARD, _REWARD_ERROR = "env/all/reward/total", "env/all/reward/std_error"
_HEADLINES = (_REWARD, "reward", "loss", "train_mean_nll")
_DURATION = re.compile(r"(?:(\d+) days?, )?(\d+):(\d\d):(\d\d)")


class CheckpointStatus(msgspec.Struct):
    path: str
    step: int | None
    complete: bool
    problem: str | None = None


class RunStatus(msgspec.Struct):
    """What is known; None where the files do not say."""

    source: str | None = None
    step: int | None = None
    total_steps: int | None = None
    percent: float | None = None
    eta_s: float | None = None
    headline: str | None = None  # which metric `value` is: the loss, or the reward
    value: float | None = None
    std_error: float | None = None  # of `value`, where it is a mean that has one
    trend: str | None = None  # falling, rising, flat
    nonfinite: list[str] = []
    checkpoint: CheckpointStatus | None = None
    collection: Progress | None = None


def read_status(directory: Path, progress_file: Path | None = None) -> RunStatus:
    """`progress_file` is that of a run that is a collection: others may be in the same directory."""
    status = RunStatus()
    if progress_file is not None:
        _from_progress(progress_file, status)
        return status
    if (directory / "trainer_log.jsonl").exists():
        _from_trainer_log(directory / "trainer_log.jsonl", status)
    elif (directory / "metrics.jsonl").exists():
        _from_metrics(directory / "metrics.jsonl", status)
    elif (progress := _newest_progress(directory)) is not None:
        _from_progress(progress, status)
    elif (state := newest_trainer_state(directory)) is not None:
        _from_trainer_state(state, status)
    status.checkpoint = _last_checkpoint(directory)
    return status


def _from_trainer_log(path: Path, status: RunStatus) -> None:
    status.source = path.name
    rows = list(last_rows(path))
    for row in rows:
        status.step = step if (step := trainer_step(row)) is not None else status.step
        if isinstance(row.get("total_steps"), int):
            status.total_steps = row["total_steps"]
        if isinstance(row.get("percentage"), int | float):
            status.percent = float(row["percentage"])
        status.eta_s = _seconds(row.get("remaining_time")) if "remaining_time" in row else status.eta_s
        if "loss" in row:
            status.nonfinite = row.get("nonfinite", [])
    if status.percent is None and status.step is not None and status.total_steps:
        status.percent = round(100 * status.step / status.total_steps, 2)
    _set_headline(status, rows)


def _from_metrics(path: Path, status: RunStatus) -> None:
    status.source = path.name
    rows = [normalize(row) for row in last_rows(path)]
    steps = [(step, row) for row in rows if (step := step_of(row)) is not None]
    if not steps:
        return
    step, last = max(steps, key=lambda pair: pair[0])
    status.step = step + 1  # steps count from 0; after step 0 one is done
    status.nonfinite = last.get("nonfinite", [])
    fraction = next(
        (row["progress/done_frac"] for _, row in reversed(steps) if row.get("progress/done_frac")), None
    )
    if fraction:
        status.percent = round(100 * fraction, 2)
        status.total_steps = _total_steps(steps)
        status.step = min(status.step, status.total_steps)  # the evaluations at the end are no step
        status.eta_s = _eta(steps, status.total_steps)
    _set_headline(status, [row for _, row in steps])


def _from_trainer_state(path: Path, status: RunStatus) -> None:
    """What there is when nothing logs beside a trainer: current as of the last checkpoint."""
    saved, history = read_trainer_state(path)
    if not saved:
        return
    status.source = path.name
    step, total = saved.get("global_step"), saved.get("max_steps")
    status.step = step if isinstance(step, int) else None
    status.total_steps = total if isinstance(total, int) and total > 0 else None
    if status.step is not None and status.total_steps:
        status.percent = round(100 * status.step / status.total_steps, 2)
    _set_headline(status, history)


def _from_progress(path: Path, status: RunStatus) -> None:
    status.source = path.name
    if (progress := read_progress(path)) is None:
        return
    status.collection = progress
    status.step, status.total_steps, status.eta_s = progress.done, progress.expected, progress.eta_s
    if progress.expected:
        status.percent = round(100 * progress.done / progress.expected, 2)
    if progress.reward_mean is not None:
        status.headline, status.value = "reward", progress.reward_mean
        status.std_error = progress.reward_std_error


def reason_collector_ended(progress: Progress, path: Path) -> str | None:
    """Why the collector of a progress file that says `running` has ended; None while it lives.

    A collector in another container may go by our host name; its pid means nothing here, its lock does.
    """
    why = _reason_it_seems_ended(progress)
    return None if why and progress.output and is_held(path.with_name(progress.output)) else why


def _reason_it_seems_ended(progress: Progress) -> str | None:
    from rollbook.runs.jobs.processes import ProcessIdentity, started_at, why_gone

    pid, host, updated = progress.pid, progress.host, unix_time(progress.updated_at)
    is_silent = updated is None or time.time() - updated > _SILENT_S
    if host != socket.gethostname() or not isinstance(pid, int):
        return f"its process on {host} has not written since {progress.updated_at}" if is_silent else None
    began, born = unix_time(progress.started_at), started_at(pid)
    if is_silent and began is not None and born is not None and born > began + _CLOCK_SLACK_S:
        return f"its process is gone; pid {pid} is another one now"
    return why_gone(ProcessIdentity(pid))


def writer_of(files: RunFiles, info: RunInfo) -> LockHolder | None:
    """The process that writes a run; None where it has ended, or its process is gone.

    Of a process on another host nothing is known but that it has not said how it ended.
    """
    from rollbook.runs.jobs.processes import ProcessIdentity, started_at, why_gone

    holder = noted_holder(files.run)
    if holder is None or (info.attempts and info.attempts[-1].ended_at is not None):
        return None
    if holder.host != socket.gethostname():
        return holder
    since, born = unix_time(holder.since), started_at(holder.pid)
    is_another = since is not None and born is not None and born > since + _CLOCK_SLACK_S
    is_gone = is_another or why_gone(ProcessIdentity(holder.pid)) is not None
    return None if is_gone and not is_held(files.run) else holder


def clear_live_fields(status: RunStatus) -> None:
    """Clear what was true only while the run lived; a collection that still says `running` is lost."""
    status.eta_s = None
    progress = status.collection
    if progress is not None and progress.status == "running":
        progress.status, progress.rate_per_s, progress.eta_s = "lost", None, None
        progress.in_flight = progress.waiting = 0


def _total_steps(steps: list[tuple[int, dict[str, Any]]]) -> int:
    """The length of the run, from the oldest line that says how much of it was done."""
    step, row = next((step, row) for step, row in steps if row.get("progress/done_frac"))
    return round((step + 1) / float(row["progress/done_frac"]))


def _set_headline(status: RunStatus, rows: list[dict[str, Any]]) -> None:
    found = (
        (name, [row[name] for row in rows if isinstance(row.get(name), int | float)]) for name in _HEADLINES
    )
    name, points = next(((name, points) for name, points in found if points), ("", []))
    if not points:
        return
    status.headline, status.value = name, float(points[-1])
    if name == _REWARD:
        last = next(row for row in reversed(rows) if isinstance(row.get(name), int | float))
        status.std_error = last.get(_REWARD_ERROR)
    recent = points[-_TREND_POINTS:]
    half = len(recent) // 2
    if half:
        before, after = sum(recent[:half]) / half, sum(recent[-half:]) / half
        change = (after - before) / (abs(before) or 1.0)
        status.trend = "flat" if abs(change) < _FLAT else ("rising" if change > 0 else "falling")


def _eta(steps: list[tuple[int, dict[str, Any]]], total: int) -> float | None:
    """The time left at the pace of the last lines: that of this session, not of the whole run."""
    times = ((step, unix_time(row.get("logged_at"))) for step, row in steps)
    timed = [(step, at) for step, at in times if at is not None]
    if len(timed) < 2 or timed[-1][0] <= timed[0][0]:
        return None
    pace = (timed[-1][1] - timed[0][1]) / (timed[-1][0] - timed[0][0])
    return round(max(0.0, pace * (total - 1 - timed[-1][0])), 1)


def _last_checkpoint(directory: Path) -> CheckpointStatus | None:
    stored = list(read_checkpoints(directory / "checkpoints.jsonl"))
    if stored:
        record = stored[-1].record
        why = flaw(record, directory)
        path = record.state_path or record.sampler_path or record.name
        return CheckpointStatus(path, record.batch, why is None, why)
    models = saved_models(directory)
    if not models:
        return None
    last = models[-1]
    return CheckpointStatus(last.path.name, last.step, last.complete, last.problem)


def _newest_progress(directory: Path) -> Path | None:
    found = list(directory.glob("*_progress.json")) if directory.is_dir() else []
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def _seconds(text: Any) -> float | None:
    match = _DURATION.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
