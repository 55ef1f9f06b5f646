"""Metrics also go to wandb, trackio or tensorboard, if the config names them; the run never waits for them.

A tracker lives in a thread of its own behind a bounded queue: `log` only puts into it. A tracker that fails,
hangs or is slow costs its own curve and one alert; what it missed is in metrics.jsonl all the same. The id
under which a tracker knows the run is chosen here, so that it can be written down before anything is sent.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, Full, Queue
from typing import Any, Protocol

from rollbook.errors import UsageError
from rollbook.records.layout import RunFiles
from rollbook.records.plain import to_plain
from rollbook.records.run_info import RunInfo, write_run_info

_log = logging.getLogger("rollbook")
_MOST_WAITING = 10_000
_CLOSE_TIMEOUT_S = 15.0
_DEFAULT_PROJECT = "rollbook"

Settings = Mapping[str, Any]
Alert = Callable[[str, str], None]


class Tracker(Protocol):
    def log(self, metrics: dict[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class WandbTracker:
    def __init__(self, run_id: str, name: str, config: Any, settings: Settings, directory: Path) -> None:
        import wandb

        options = {"project": _DEFAULT_PROJECT, "name": name, "dir": str(directory), **settings}
        self._run = wandb.init(id=run_id, resume="allow", config=config, reinit="create_new", **options)

    def log(self, metrics: dict[str, float], step: int) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish()


class TrackioTracker:
    def __init__(self, run_id: str, name: str, config: Any, settings: Settings, directory: Path) -> None:
        import trackio

        options = {"project": _DEFAULT_PROJECT, **settings}
        self._run = trackio.init(name=run_id, config=config, resume="allow", **options)
        self._trackio = trackio

    def log(self, metrics: dict[str, float], step: int) -> None:
        self._trackio.log(metrics, step=step)

    def close(self) -> None:
        self._trackio.finish()


class TensorboardTracker:
    def __init__(self, run_id: str, name: str, config: Any, settings: Settings, directory: Path) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(str(settings.get("log_dir") or directory / "tensorboard"))

    def log(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


_KINDS: dict[str, Callable[..., Tracker]] = {
    "wandb": WandbTracker,
    "trackio": TrackioTracker,
    "tensorboard": TensorboardTracker,
}


def trackers_in(config: object) -> Any:
    """What a config, a mapping or an object, has under `trackers`."""
    return config.get("trackers") if isinstance(config, Mapping) else getattr(config, "trackers", None)


def parse_trackers(named: Any) -> dict[str, dict[str, Any]]:
    """`"wandb"`, `["wandb", "trackio"]` or `{"wandb": {"project": "p"}}`, as names with their settings."""
    if named is None:
        return {}
    if isinstance(named, str):
        named = [named]
    settings = dict(named) if isinstance(named, Mapping) else {name: {} for name in named}
    for name in settings:
        if name not in _KINDS:
            raise UsageError(f"tracker {name!r} is not known; there are: {', '.join(_KINDS)}")
    return {name: dict(value or {}) for name, value in settings.items()}


class Trackers:
    """All trackers of a run. With none named, every call is free."""

    def __init__(
        self,
        named: Mapping[str, Settings],
        files: RunFiles,
        info: RunInfo,
        config: Any,
        alert: Alert,
    ) -> None:
        """`named` is what `parse_trackers` returns; run.json gets the ids."""
        root = files.root
        self._threads = [
            _TrackerThread(kind, partial(_KINDS[kind], info.id, root.name, config, settings, root), alert)
            for kind, settings in named.items()
        ]
        if named:
            info.extra["trackers"] = dict.fromkeys(named, info.id)
            write_run_info(files.run, info)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        if not self._threads:
            return
        numbers = {
            key: float(value)
            for key, value in to_plain(metrics).items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        for thread in self._threads:
            thread.put((numbers, step))

    def close(self) -> None:
        """Give every tracker a while to send what it has, together; then go."""
        for thread in self._threads:
            thread.put(None)
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for thread in self._threads:
            thread.wait(max(0.0, deadline - time.monotonic()))


class _TrackerThread:
    """One tracker and its queue, in a thread that does not keep the process alive, as an executor's would."""

    def __init__(self, kind: str, make: Callable[[], Tracker], alert: Alert) -> None:
        self._kind, self._make, self._alert = kind, make, alert
        self._lines: Queue[tuple[dict[str, float], int] | None] = Queue(_MOST_WAITING)
        self._dropped = 0
        self._is_given_up = False
        self._thread = threading.Thread(target=self._work, name=f"tracker {kind}", daemon=True)
        self._thread.start()

    def put(self, line: tuple[dict[str, float], int] | None) -> None:
        """A line to send, or None after the last one. Where too many wait, the oldest is dropped."""
        while not self._is_given_up:
            with suppress(Full):
                self._lines.put_nowait(line)
                break
            with suppress(Empty):
                self._lines.get_nowait()
                self._dropped += 1

    def wait(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._is_given_up = True
            left = max(0, self._lines.qsize() - 1)  # without the None
            within = f"{_CLOSE_TIMEOUT_S:g} s"
            self._warn(f"{self._kind} did not finish", f"not within {within}; {left} lines were not sent")
        elif self._dropped:
            self._warn(f"{self._kind} is slow", f"{self._dropped} lines were not sent to it")

    def _work(self) -> None:
        try:
            tracker = self._make()
            while (line := self._lines.get()) is not None:
                tracker.log(*line)
            tracker.close()
        except Exception as error:  # whatever a tracker does, the run continues without it
            if not self._is_given_up:
                self._is_given_up = True
                hint = f"; type: pip install {self._kind}" if isinstance(error, ImportError) else ""
                self._warn(f"{self._kind} does not record this run", f"{type(error).__name__}: {error}{hint}")

    def _warn(self, title: str, text: str) -> None:
        """Warn in the record and on the terminal, where somebody waits for curves."""
        self._alert(title, text)
        _log.warning("%s: %s", title, text)
