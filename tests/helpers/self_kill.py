"""Kills its own process at a chosen moment: before, in the middle of, or after one of its writes and stages.

    watch(root, log=path)                                     # every moment is a line of the log
    watch(root, kill_at="after write metrics.jsonl", nth=3)   # the third such moment kills

A moment is named by what happens and to which file below `root`, numbers in names as N: "before replace
run.json", "half write train_iteration_N_transcripts.jsonl", "after step of the optimizer". After a half write
half of what was to be written is there.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import stat
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

WATCH = "ROLLBOOK_TEST_WATCH"  # a variable: what `watch` is given, as JSON
_RANDOM = re.compile(r"\.[0-9a-f]{12}\.tmp$")
_NUMBER = re.compile(r"\d{6}|(?<=attempt_)\d{3}|(?<=from_byte_)\d+")


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
        self.synced: dict[tuple[int, int], int] = {}  # by device and inode: how much of a file was synced

    def name_of(self, file: object, directory: int | None = None) -> str | None:
        """A path or a descriptor as it stands in a moment; None for what is outside of the run."""
        if isinstance(file, int):
            if (text := _path_of(file)) is None:
                return None
        else:
            within = "" if directory is None else _path_of(directory) or ""
            text = os.path.abspath(os.path.join(within, os.fsdecode(file)))  # type: ignore[arg-type]  # noqa: PTH100, PTH118
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


def _path_of(descriptor: int) -> str | None:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115 - bytes that are no text, too
    except OSError:
        return None


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
    for name in ("fsync", "fdatasync", "truncate", "ftruncate", "unlink", "mkdir", "rmdir"):
        _wrap(os, name, moments, lambda first, *_, dir_fd=None: moments.name_of(first, dir_fd))
    for name in ("rename", "replace"):
        _wrap(os, name, moments, lambda _, second: moments.name_of(second))
    _watch_buffered_writes(moments)
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


def _watch_buffered_writes(moments: Moments) -> None:
    """What no `os.write` writes comes to light when it is synced: half of it is then there, or all."""
    plain_sync = os.fsync

    def sync(descriptor: int) -> None:
        name = moments.name_of(descriptor)
        status = os.fstat(descriptor)
        if name is not None and stat.S_ISREG(status.st_mode) and not name.endswith(".jsonl"):
            file = status.st_dev, status.st_ino
            before = moments.synced.get(file, 0)
            if status.st_size > before:
                if moments.is_next(half := f"half write {name}"):
                    os.truncate(f"/proc/self/fd/{descriptor}", (before + status.st_size) // 2)
                moments.reached(half)
                moments.synced[file] = status.st_size
        plain_sync(descriptor)

    os.fsync = sync


def _watch_stages(moments: Moments) -> None:
    import safetensors.torch

    from rollbook.samplers.engine import Engine as Sampler
    from rollbook.train.engine import Engine
    from rollbook.train.optimizer import Optimizer

    _wrap(Sampler, "step", moments, lambda *_: "of sampling")
    _wrap(Engine, "step_of_shares", moments, lambda *_, **__: "of training")
    _wrap(Engine, "_backward", moments, lambda *_, **__: "of training")
    _wrap(Optimizer, "step", moments, lambda *_, **__: "of the optimizer")
    plain_serialize = safetensors.torch.serialize_file

    def serialize(data: Any, path: Any, **more: Any) -> None:
        name = moments.name_of(path)
        moments.reached(f"before write {name}")
        plain_serialize(data, path, **more)
        moments.reached(f"after write {name}")

    safetensors.torch.serialize_file = serialize


def _wrap(owner: Any, name: str, moments: Moments, of: Callable[..., str | None]) -> None:
    plain = getattr(owner, name)

    @functools.wraps(plain)
    def wrapped(*arguments: Any, **more: Any) -> Any:
        what = of(*arguments, **more)
        if what is None:
            return plain(*arguments, **more)
        moments.reached(f"before {name} {what}")
        result = plain(*arguments, **more)
        moments.reached(f"after {name} {what}")
        return result

    setattr(owner, name, wrapped)
