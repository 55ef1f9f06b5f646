"""Follow a growing file of lines from where the last look ended.

Each `poll` returns the complete lines that are new. A file that was cut, replaced or rewritten below the
place already read is noticed, even when it has grown past that place again in the meantime (a resumed run
does just that): `restarted` is then true and the lines come from the beginning, so a consumer drops what it
had. A poll reads a bounded amount; `more` says that it left bytes unread and another one should follow.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from rollbook.records.jsonl import Line

_WITNESS = 256


class Batch(NamedTuple):
    lines: list[Line]
    restarted: bool
    more: bool


class Tail:
    def __init__(
        self, path: Path | str, *, start: int = 0, number: int = 1, max_bytes: int = 8 << 20
    ) -> None:
        """Begin where an earlier Tail ended: `start` is its `offset`, `number` its `number`."""
        self.path = Path(path)
        self.offset = start
        self.number = number  # of the next line
        self._max_bytes = max_bytes
        self._identity: tuple[int, int] | None = None
        self._witness = b""  # the last bytes before `offset`: they change when the file is rewritten

    def poll(self) -> Batch:
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            gone = self.offset > 0
            self._restart(None)
            return Batch([], restarted=gone, more=False)
        try:
            return self._poll(descriptor)
        finally:
            os.close(descriptor)

    def _poll(self, descriptor: int) -> Batch:
        data = self._read(descriptor)
        # Only now, so that a rewrite at any moment before the read is noticed.
        status = os.fstat(descriptor)
        identity = (status.st_dev, status.st_ino)
        restarted = self._was_rewritten(descriptor, identity, status.st_size)
        if restarted:
            self._restart(identity)
            data = self._read(descriptor)
        self._identity = identity
        read_to = self.offset + len(data)
        whole = data[: data.rfind(b"\n") + 1]
        lines = []
        for piece in whole.split(b"\n")[:-1]:
            end = self.offset + len(piece) + 1
            lines.append(Line(piece, self.number, self.offset, end))
            self.offset, self.number = end, self.number + 1
        self._witness = (self._witness + whole[-_WITNESS:])[-_WITNESS:]
        return Batch(lines, restarted, more=read_to < status.st_size)

    def _read(self, descriptor: int) -> bytes:
        """What is new, at most `max_bytes`, but always at least one whole line if there is one."""
        wanted = self._max_bytes
        while True:
            data = os.pread(descriptor, wanted, self.offset)
            if b"\n" in data or len(data) < wanted:
                return data
            wanted *= 2

    def _was_rewritten(self, descriptor: int, identity: tuple[int, int], size: int) -> bool:
        if size < self.offset:
            return True
        if self._identity is not None and identity != self._identity:
            return True
        before = os.pread(descriptor, len(self._witness), self.offset - len(self._witness))
        return before != self._witness

    def _restart(self, identity: tuple[int, int] | None) -> None:
        self.offset = 0
        self.number = 1
        self._identity = identity
        self._witness = b""
