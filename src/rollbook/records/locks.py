"""One writer a file, and the second one is told who the first is.

The lock is an `flock` on a small sidecar (`.metrics.jsonl.lock`) that holds the owner's pid and host. The
kernel drops it when the owner dies, however it dies, so a stale sidecar never blocks anyone. A record lock
would vanish as soon as anything in the process read the sidecar (a copy of the run directory, an upload);
an `flock` does not. Its one weak point is closed here: a forked child would share it, so children let go of
it at birth, and data-loader workers that outlive a killed trainer do not keep its run locked.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import socket
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import msgspec

from rollbook.errors import LockedError, WriteError
from rollbook.records.atomic import make_directory

_RETRY_S = (0.001, 0.01)
_random = random.SystemRandom()  # the loop's own numbers must not depend on who waited for a lock


class LockHolder(msgspec.Struct):
    pid: int
    host: str
    since: str


_held: set[int] = set()  # the descriptors of this process's locks
_guard = threading.RLock()  # of _held; also taken around fork, so that no child inherits half a change


def lock_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


def noted_holder(path: Path) -> LockHolder | None:
    """The process that last took the lock of a file and did not release it; it may have been killed since."""
    try:
        return msgspec.json.decode(lock_path(Path(os.path.realpath(path))).read_bytes(), type=LockHolder)
    except (OSError, msgspec.MsgspecError):
        return None


class FileLock:
    """An exclusive lock on `path`; taken on construction, dropped by `release` or by death."""

    def __init__(
        self, path: Path, *, wait_s: float = 0.0, on_wait: Callable[[str], None] | None = None
    ) -> None:
        """`wait_s` is how long to wait for another holder; `on_wait` is called once, with who that is."""
        self.path = path
        self._sidecar = lock_path(Path(os.path.realpath(path)))  # one file has one lock, whatever links to it
        self._owner_pid = os.getpid()
        deadline = time.monotonic() + wait_s
        while True:
            try:
                with _guard:
                    self._descriptor = self._take()
                    _held.add(self._descriptor)
                return
            except LockedError as error:
                if time.monotonic() >= deadline:
                    raise
                if on_wait is not None:
                    on_wait(str(error))
                    on_wait = None
            time.sleep(_random.uniform(*_RETRY_S))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _take(self) -> int:
        while True:
            try:
                make_directory(self._sidecar.parent)
                descriptor = os.open(self._sidecar, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except OSError as error:
                raise WriteError(f"{self.path}: cannot be locked: {error.strerror or error}") from error
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = _read_holder(descriptor)
                os.close(descriptor)
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    raise LockedError(_refusal(self.path, holder)) from None
                raise WriteError(
                    f"{self.path}: this file system has no locks ({error.strerror}); "
                    "put the run on a local or NFSv4 directory"
                ) from error
            if _is_same_file(self._sidecar, descriptor):
                with contextlib.suppress(OSError):  # a full disk costs the holder's name, not the lock
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, msgspec.json.encode(_this_process()), 0)
                return descriptor
            os.close(descriptor)  # the last owner removed it between our open and our lock

    def release(self) -> None:
        if os.getpid() != self._owner_pid:
            return
        with _guard:
            if self._descriptor < 0:
                return
            with contextlib.suppress(OSError):
                if _is_same_file(self._sidecar, self._descriptor):  # else it belongs to whoever came after us
                    self._sidecar.unlink()
            _held.discard(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1


def _close_locks_in_child() -> None:
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()
    _guard.release()


os.register_at_fork(
    before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_close_locks_in_child
)


def _this_process() -> LockHolder:
    return LockHolder(os.getpid(), socket.gethostname(), datetime.now(UTC).isoformat(timespec="seconds"))


def _is_same_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _read_holder(descriptor: int) -> LockHolder | None:
    try:
        return msgspec.json.decode(os.pread(descriptor, 4096, 0), type=LockHolder)
    except (OSError, msgspec.MsgspecError):
        return None


def _refusal(path: Path, holder: LockHolder | None) -> str:
    who = "another process"
    if holder is not None:
        here = (holder.pid, holder.host) == (os.getpid(), socket.gethostname())
        who = "this process" if here else who
        who += f" (pid {holder.pid}, host {holder.host}, since {holder.since})"
    return f"{path} is being written by {who}; wait for it or stop it, then try again"
