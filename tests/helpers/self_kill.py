"""Kills its own process at a chosen moment: before, in the middle of, or after one of its writes and stages.

    watch(root, log=path)                                     # every moment is a line of the log
    watch(root, kill_at="after write metrics.jsonl", nth=3)   # the third such moment kills

A moment is named by what happens and to which file below `root`, numbers of six digits as N: "before replace
run.json", "half write train_iteration_N_transcripts.jsonl", "after step of the optimizer".
"""

from __future__ import annotations

import functools
import os
import re
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

WATCH = "ROLLBOOK_TEST_WATCH"  # a variable: what `watch` is given, as JSON
_RANDOM = re.compile(r"\.[0-9a-f]{12}\.tmp$")
_NUMBER = re.compile(r"\d{6}")


class Moments:
    """Counts what happens; kills when it is time."""

    def __init__(
        self, root: Path, kill_at: str | None, nth: int, log: Path | None, how: signal.Signals
    ) -> None:
        self.root = os.path.realpath(root)
        self._kill_at, self._nth, self._how = kill_at, nth, how
        self._log = None if log is None else log.open("a", buffering=1)
        self._counts: Counter[str] = Counter()
        self._guard = threading.RLock()

    def name_of(self, file: object) -> str | None:
        """A path or a descriptor as it stands in a moment; None for what is outside of the run."""
        if isinstance(file, int):
            try:
                text = str(Path(f"/proc/self/fd/{file}").readlink())
            except OSError:
                return None
        else:
            text = os.path.abspath(os.fsdecode(file))  # type: ignore[arg-type]  # noqa: PTH100
        if text != self.root and not text.startswith(self.root + "/"):
            return None
        return _NUMBER.sub("N", _RANDOM.sub(".tmp", text[len(self.root) + 1 :] or "."))

    def reached(self, moment: str) -> None:
        with self._guard:
            self._counts[moment] += 1
            if self._log is not None:
                self._log.write(f"{moment}\n")
            if moment == self._kill_at and self._counts[moment] == self._nth:
                os.kill(os.getpid(), self._how)

    def is_next(self, moment: str) -> bool:
        return moment == self._kill_at and self._counts[moment] + 1 == self._nth


def watch(
    root: Path,
    *,
    kill_at: str | None = None,
    nth: int = 1,
    log: Path | None = None,
    how: int = signal.SIGKILL,
) -> Moments:
    """Watch everything that this process does from now on; only for a process that is there to be killed."""
    moments = Moments(root, kill_at, nth, log, signal.Signals(how))
    _watch_files(moments)
    _watch_stages(moments)
    return moments


def _watch_files(moments: Moments) -> None:
    for name in ("fsync", "fdatasync", "ftruncate", "unlink", "mkdir", "rmdir"):
        _wrap(os, name, moments, lambda arguments: moments.name_of(arguments[0]))
    for name in ("rename", "replace"):
        _wrap(os, name, moments, lambda arguments: moments.name_of(arguments[1]))
    plain_write = os.write

    def write(descriptor: int, data: bytes) -> int:
        name = moments.name_of(descriptor)
        if name is None:
            return plain_write(descriptor, data)
        moments.reached(f"before write {name}")
        if moments.is_next(half := f"half write {name}"):
            plain_write(descriptor, data[: len(data) // 2])
        moments.reached(half)
        written = plain_write(descriptor, data)
        moments.reached(f"after write {name}")
        return written

    os.write = write  # type: ignore[assignment]

    def on_open(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or isinstance(arguments[0], int):
            return
        mode, flags = arguments[1:]
        writes = (
            any(letter in mode for letter in "wax+") if mode else (flags or 0) & (os.O_WRONLY | os.O_RDWR)
        )
        if writes and (name := moments.name_of(arguments[0])) is not None:
            moments.reached(f"before open {name}")

    sys.addaudithook(on_open)


def _watch_stages(moments: Moments) -> None:
    import safetensors.torch

    from rollbook.samplers.engine import Engine as Sampler
    from rollbook.train.engine import Engine
    from rollbook.train.optimizer import Optimizer

    _wrap(Sampler, "step", moments, lambda _: "of sampling")
    _wrap(Engine, "step", moments, lambda _: "of training")
    _wrap(Engine, "_backward", moments, lambda _: "of training")
    _wrap(Optimizer, "step", moments, lambda _: "of the optimizer")
    plain_serialize = safetensors.torch.serialize_file

    def serialize(data: Any, path: Any, **more: Any) -> None:
        name = moments.name_of(path)
        moments.reached(f"before write {name}")
        plain_serialize(data, path, **more)
        if moments.is_next(half := f"half write {name}"):
            os.truncate(path, Path(path).stat().st_size // 2)
        moments.reached(half)
        moments.reached(f"after write {name}")

    safetensors.torch.serialize_file = serialize


def _wrap(owner: Any, name: str, moments: Moments, of: Callable[[tuple[Any, ...]], str | None]) -> None:
    plain = getattr(owner, name)

    @functools.wraps(plain)
    def wrapped(*arguments: Any, **more: Any) -> Any:
        what = of(arguments)
        if what is None:
            return plain(*arguments, **more)
        moments.reached(f"before {name} {what}")
        result = plain(*arguments, **more)
        moments.reached(f"after {name} {what}")
        return result

    setattr(owner, name, wrapped)
