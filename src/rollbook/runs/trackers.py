"""Metrics also go to wandb, trackio or tensorboard, if the config names them; the run never waits for them.

A tracker lives in a thread of its own behind a bounded queue: `log` only puts into it. A tracker that fails,
hangs or is slow costs its own curve and one alert; what it missed is in metrics.jsonl all the same. The id
under which a tracker knows the run is chosen here, so that it can be written down before anything is sent.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rollbook.errors import UsageError
from rollbook.records.plain import to_plain

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


def named_in(config: object) -> Any:
    """What a config, a mapping or an object, says under `trackers`."""
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
        *,
        run_id: str,
        name: str,
        config: Any,
        directory: Path,
        alert: Alert,
    ) -> None:
        """`named` is what `parse_trackers` returns."""
        self.ids = dict.fromkeys(named, run_id)
        self._feeds = [
            _Feed(kind, partial(_KINDS[kind], run_id, name, config, settings, directory), alert)
            for kind, settings in named.items()
        ]

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        if not self._feeds:
            return
        numbers = {
            key: float(value)
            for key, value in to_plain(metrics).items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        for feed in self._feeds:
            feed.put(numbers, step)

    def close(self) -> None:
        """Give every tracker a while to send what it has, together; then go."""
        for feed in self._feeds:
            feed.finish()
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for feed in self._feeds:
            feed.wait(max(0.0, deadline - time.monotonic()))


class _Feed:
    """One tracker, its thread and its queue."""

    def __init__(self, kind: str, make: Callable[[], Tracker], alert: Alert) -> None:
        self._kind, self._make, self._alert = kind, make, alert
        self._waiting: deque[tuple[dict[str, float], int]] = deque(maxlen=_MOST_WAITING)
        self._dropped = 0
        self._finishing = False
        self._dead = False
        self._news = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"tracker {kind}", daemon=True)
        self._thread.start()

    def _tell(self, title: str, text: str) -> None:
        """In the record, and to whoever looks at the terminal and waits for curves."""
        self._alert(title, text)
        _log.warning("%s: %s", title, text)

    def put(self, metrics: dict[str, float], step: int) -> None:
        if self._dead:
            return
        if len(self._waiting) == _MOST_WAITING:
            self._dropped += 1
        self._waiting.append((metrics, step))
        self._news.set()

    def finish(self) -> None:
        self._finishing = True
        self._news.set()

    def wait(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._dead = True
            self._tell(
                f"{self._kind} was left behind",
                f"it did not finish within {_CLOSE_TIMEOUT_S:g} s; {len(self._waiting)} lines were not sent",
            )
        elif self._dropped:
            self._tell(f"{self._kind} was too slow", f"{self._dropped} lines were not sent to it")

    def _work(self) -> None:
        try:
            tracker = self._make()
            while not (self._finishing and not self._waiting):
                self._news.wait()
                self._news.clear()
                while self._waiting:
                    tracker.log(*self._waiting.popleft())
            tracker.close()
        except Exception as error:  # whatever a tracker does, the run goes on without it
            if self._dead:
                return
            self._dead = True
            self._waiting.clear()
            hint = f"; type: pip install {self._kind}" if isinstance(error, ImportError) else ""
            self._tell(f"{self._kind} does not record this run", f"{type(error).__name__}: {error}{hint}")
