"""Append-only files of lines that are never torn and never lost once acknowledged.

The promise: one `write(2)` a line, or for a few whole ones, on an `O_APPEND` descriptor under an exclusive
lock; a line counts as acknowledged when `wait` (or an `EVERY_LINE` append) returns, and then it is on the
disk. Reopening cuts an unterminated last line, the only damage a killed writer can leave, and forgives
nothing else: any other
malformed line is an error that names file and line. Lines end at `\\n` and nowhere else, so U+2028 and
friends are data. This module knows lines; what is in them is the business of the modules above.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

import orjson

from rollbook.errors import BadLineError, WriteError
from rollbook.records.atomic import Writeback, fsync_directory, make_directory
from rollbook.records.line_secrets import LineSecrets
from rollbook.records.locks import FileLock

_CHUNK = 1 << 20


@dataclass(frozen=True)
class SyncPolicy:
    """When appended lines reach the disk by themselves; `wait` and `sync` work under every policy."""

    every_line: bool = False
    interval_ms: int | None = None

    def __post_init__(self) -> None:
        if self.interval_ms is not None and self.interval_ms <= 0:
            raise ValueError(f"interval_ms must be positive, not {self.interval_ms}")


EVERY_LINE = SyncPolicy(every_line=True)
ON_CLOSE = SyncPolicy()


def every_ms(interval: int) -> SyncPolicy:
    return SyncPolicy(interval_ms=interval)


class Line(NamedTuple):
    """One complete line: its bytes without the newline, and where it is."""

    data: bytes
    number: int
    start: int
    end: int


class JsonlWriter:
    """The one writer of a file. Thread-safe; not for use across `fork`."""

    def __init__(
        self,
        path: Path | str,
        *,
        sync: SyncPolicy = ON_CLOSE,
        check: bool = True,
        lock: FileLock | None = None,
        follow_links: bool = False,
        is_large: bool = False,
    ) -> None:
        """Open for appending, repairing the tail; `check=False` skips reading the lines already there.

        `lock` is that of this file, where the caller holds it already; it stays the caller's to release.
        `is_large`: the disk begins with what is appended before it is synced.
        `follow_links`: a user named this path, so it may be a symlink; any other that is one is refused.
        """
        self.path = Path(path)
        self.policy = sync
        if not follow_links:
            _refuse_link(self.path)
        self._lock = None if lock else FileLock(self.path)
        with contextlib.ExitStack() as undo:
            undo.callback(self._release)
            make_directory(self.path.parent)
            self._descriptor = _open_append(self.path, follow_links)
            undo.callback(os.close, self._descriptor)
            self._end = repair(self.path, self._descriptor, check=check)
            undo.pop_all()
        self._writeback = Writeback(self._descriptor, self._end) if is_large else None
        self._secrets = LineSecrets()
        self._pid = os.getpid()
        self._settled = True  # False while a write is under way, and after one that an exception cut short
        self._durable = 0
        self._failure: WriteError | None = None
        self._closed = False
        # Reentrant: a signal handler may append in the middle of an append of the thread it interrupts.
        self._append_guard = threading.RLock()
        self._sync_guard = threading.RLock()
        self._dirty = threading.Event()
        self._stopping = threading.Event()
        self._committer: threading.Thread | None = None

    @property
    def position(self) -> int:
        """The length of the file: the end of the last appended line."""
        return self._end

    @property
    def durable(self) -> int:
        """Every line that ends at or before this offset is known to be on the disk."""
        return self._durable

    def append(self, data: bytes) -> int:
        """Write one line; returns the offset of its end, to be given to `wait`."""
        return self.append_all([data])

    def append_all(self, lines: Sequence[bytes]) -> int:
        """Write lines in one go: all of them or, after an error, none. Returns the offset of their end."""
        for data in lines:
            if b"\n" in data or not (data.startswith(b"{") and data.endswith(b"}")):
                raise ValueError(f"{self.path}: a line must be one JSON object without a newline in it")
        block = b"\n".join([*map(self._secrets.cleaned_json, lines), b""])
        self._refuse_in_a_fork()
        with self._append_guard:
            self._refuse_if_unusable()
            self._write_whole(block)
            end = self._end
            if self._writeback is not None:
                self._writeback.up_to(end)
        if self.policy.every_line:
            self.wait(end)
        elif self.policy.interval_ms is not None and not self._dirty.is_set():
            self._wake_committer()
        return end

    def wait(self, end: int) -> None:
        """Return once the line that ends at `end` is on the disk.

        Callers who arrive while another one's fsync is under way share the next one: group commit
        without a clock.
        """
        if self._durable >= end:
            return
        self._refuse_in_a_fork()
        if end > self._end:
            raise ValueError(f"{self.path}: byte {end} is past the last line, which ends at {self._end}")
        with self._sync_guard:
            if self._durable < end:
                self._sync_now()

    def sync(self) -> int:
        """Put everything appended so far on the disk; returns the new `durable` offset."""
        self.wait(self._end)
        return self._durable

    def cut(self, end: int) -> None:
        """Drop every line behind `end`, which is the end of a line; the file may be appended to again."""
        self._refuse_in_a_fork()
        with self._append_guard:
            if self._closed:
                raise WriteError(f"{self.path}: the writer is closed")
            if end > self._end:
                raise ValueError(f"{self.path}: byte {end} is past the last line, which ends at {self._end}")
            try:
                os.ftruncate(self._descriptor, end)
            except OSError as error:
                raise WriteError(f"{self.path}: cannot be cut: {error.strerror or error}") from error
            self._end, self._durable = end, min(self._durable, end)
            self._settled = True

    def close(self) -> None:
        """Sync and release the file. Safe to call twice; raises if the last lines could not be synced."""
        if os.getpid() != self._pid:
            return  # it is the parent's to close
        with self._append_guard:
            if self._closed:
                return
            self._closed = True
        self._stopping.set()
        self._dirty.set()
        try:
            if self._committer is not None:
                self._committer.join()
            self.sync()
        finally:
            os.close(self._descriptor)
            self._release()

    def __enter__(self) -> JsonlWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def _refuse_if_unusable(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise WriteError(f"{self.path}: the writer is closed")

    def _refuse_in_a_fork(self) -> None:
        # Before any lock is touched: a thread that did not survive the fork may hold it for ever.
        if os.getpid() != self._pid:
            raise WriteError(
                f"{self.path}: opened by pid {self._pid}; a forked process must not append to it"
            )

    def _write_whole(self, line: bytes) -> None:
        if not self._settled:
            self._settle()
        self._settled = False
        try:
            written = os.write(self._descriptor, line)
            why = "the disk is full or a size limit is reached"
        except OSError as error:
            written, why = 0, error.strerror or str(error)
        if written < len(line):
            self._take_back(why)
        if self._settled:  # by a signal handler that appended meanwhile: was this line there yet?
            self._settle()
        else:
            self._end += len(line)
            self._settled = True

    def _settle(self) -> None:
        # Ctrl-C can arrive between a write and the count of it; from then on only the file knows its end.
        try:
            self._end = repair(self.path, self._descriptor, check=False)
            self._settled = True
        except OSError as error:
            self._failure = WriteError(
                f"{self.path}: an interrupted append could not be undone ({error.strerror or error}); "
                "it will be when the file is next opened"
            )
            raise self._failure from error

    def _take_back(self, why: str) -> NoReturn:
        # The lock makes us the only writer, so cutting to the last known end removes only our own half line.
        try:
            os.ftruncate(self._descriptor, self._end)
        except OSError as error:
            self._failure = WriteError(
                f"{self.path}: append failed ({why}) and its half line could not be cut "
                f"({error.strerror}); it will be when the file is next opened"
            )
            raise self._failure from error
        self._settled = True
        raise WriteError(
            f"{self.path}: append failed: {why}. The line was not written; all earlier lines are intact. "
            "Free some space and go on"
        )

    def _sync_now(self) -> None:
        if self._failure is not None:
            raise self._failure
        end = self._end
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            # After a failed fsync the kernel may drop the pages and report success the next time.
            self._failure = WriteError(
                f"{self.path}: the disk did not confirm the last lines ({error.strerror or error}); "
                f"everything up to byte {self._durable} is safe"
            )
            raise self._failure from error
        self._durable = max(end, self._durable)

    def _wake_committer(self) -> None:
        self._dirty.set()
        if self._committer is None:
            with self._append_guard:
                if self._committer is None and not self._closed:
                    self._committer = threading.Thread(
                        target=self._commit_in_the_background, name=f"sync {self.path.name}", daemon=True
                    )
                    self._committer.start()

    def _commit_in_the_background(self) -> None:
        interval = (self.policy.interval_ms or 0) / 1000
        while not self._stopping.is_set():
            self._dirty.wait()
            self._stopping.wait(interval)
            self._dirty.clear()
            with contextlib.suppress(WriteError):  # kept in _failure: the next append or wait raises it
                self.sync()


def _refuse_link(path: Path) -> None:
    if path.is_symlink():
        raise WriteError(f"{path} is a symlink, so its lines would be written to another file; remove it")


def _open_append(path: Path, follow_links: bool) -> int:
    nofollow = 0 if follow_links else os.O_NOFOLLOW
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | nofollow, 0o666)
    except OSError as error:
        raise WriteError(f"{path}: cannot be opened for appending: {error.strerror or error}") from error
    try:
        # Even when it was there: whoever made it may have died before its name was on the disk.
        fsync_directory(path.resolve().parent)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def repair(path: Path, descriptor: int, *, check: bool = True) -> int:
    """Cut an unterminated last line and return the length that remains.

    With `check`, every other line must be a JSON object; the first that is not raises with its number.
    """
    size = os.fstat(descriptor).st_size
    end = _end_of_last_line(descriptor, size)
    if check:
        for line in read_lines(path, end=end):
            check_line(path, line)
    if end < size:
        os.ftruncate(descriptor, end)
        os.fdatasync(descriptor)
    return end


def check_line(path: Path, line: Line) -> None:
    """Raise unless the line is one JSON object."""
    try:
        value = orjson.loads(line.data)
    except orjson.JSONDecodeError as error:
        raise BadLineError(path, line.number, _why_malformed(line.data, str(error))) from None
    if not isinstance(value, dict):
        raise BadLineError(path, line.number, "not a JSON object")


def _why_malformed(data: bytes, error: str) -> str:
    if not data.strip():
        return "a blank line, where a JSON object must stand"
    if data.strip(b"\0") == b"":
        return "a run of NUL bytes, as a power cut leaves them; restore the file or cut this line"
    if "after document" in error and b"}{" in data:
        return "two records glued together without a newline between them"
    return f"not valid JSON ({error[:1].lower()}{error[1:]})"


def _end_of_last_line(descriptor: int, size: int) -> int:
    position = size
    while position > 0:
        start = max(0, position - _CHUNK)
        newline = os.pread(descriptor, position - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        position = start
    return 0


def read_lines(
    path: Path | str, *, start: int = 0, end: int | None = None, number: int = 1, accept_tail: bool = False
) -> Iterator[Line]:
    """Stream the complete lines between two offsets, a chunk at a time.

    An unterminated last line is a write under way and is left alone, unless `accept_tail` says that the
    file comes from elsewhere and may lack its last newline. `number` is the number of the first line read.
    """
    with Path(path).open("rb", buffering=0) as file:
        file.seek(start)
        parts: list[bytes] = []  # of a line longer than a chunk, joined once
        line_start = position = start
        while True:
            wanted = _CHUNK if end is None else min(_CHUNK, end - position)
            chunk = file.read(wanted) if wanted > 0 else b""
            if not chunk:
                break
            position += len(chunk)
            pieces = chunk.split(b"\n")
            if len(pieces) == 1:
                parts.append(chunk)
                continue
            pieces[0] = b"".join((*parts, pieces[0]))
            tail = pieces.pop()
            for data in pieces:
                line_end = line_start + len(data) + 1
                yield Line(data, number, line_start, line_end)
                line_start, number = line_end, number + 1
            parts = [tail] if tail else []
        if accept_tail and parts:
            data = b"".join(parts)
            yield Line(data, number, line_start, line_start + len(data))
