"""Plain files of our own rows into one, checked and copied at once.

Parsing every row takes the longest and holds the interpreter's lock, so a copy of this process does that,
while this one takes the SHA-256 of the files and writes them. Both go through them in the same order, at
about the same pace, and so find most of them in the processor's cache. A thread has the disk begin meanwhile
with what is written, to spare the end.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

from rollbook.data.job import DataJob
from rollbook.data.output import RowOutput
from rollbook.data.quick_check import NotQuick, check_files
from rollbook.data.rows import Advance
from rollbook.forked import InACopy

_WINDOW = 16 << 20  # of a file in memory at once; a multiple of every size of page
_PIECE = 1 << 18  # the page cache takes large writes at a third of the speed, measured
_PUSH_EVERY = 64 << 20


def merge_blocks(job: DataJob, directory: Path, advance: Advance) -> None:
    """Write all rows of the inputs as they are, with the newline a file may lack; or raise NotQuick."""
    assert job.output is not None
    check = InACopy(partial(check_files, job.paths, directory / "keys"))
    with closing(check), _Copier(job.output, advance) as copier:
        for path in job.paths:
            digest, is_whole = copier.copy(path)
            job.set_digest(path, digest)
            if not is_whole:
                job.count("newlines_added")
        rows = check.result()
    if rows is None:
        raise NotQuick
    for path, count in rows.items():
        job.set_rows(path, count)
    job.output.rows = job.rows_in


class _Copier:
    """Copies file after file behind each other, and takes their digests on the way."""

    def __init__(self, output: RowOutput, advance: Advance) -> None:
        self._output, self._advance = output, advance
        self._pushing = ThreadPoolExecutor(1, thread_name_prefix="push")
        self._pushed: Future[None] | None = None
        self._since_push = 0

    def copy(self, path: Path) -> tuple[str, bool]:
        """The file's SHA-256, and whether its last line has a newline; one is added if not."""
        digest, last = hashlib.sha256(), b"\n"
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            for start in range(0, size, _WINDOW):
                length = min(_WINDOW, size - start)
                with mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ, offset=start) as window:
                    digest.update(window)
                    self._write(window)
                    last = window[-1:]
        is_whole = last == b"\n"
        if not is_whole:
            self._output.write_block(b"\n", 0)
        return digest.hexdigest(), is_whole

    def _write(self, window: mmap.mmap) -> None:
        with memoryview(window) as data:
            for start in range(0, len(data), _PIECE):
                with data[start : start + _PIECE] as piece:
                    self._output.write_block(piece, 0)
                    self._advance(len(piece))
        self._since_push += len(window)
        if self._since_push >= _PUSH_EVERY and (self._pushed is None or self._pushed.done()):
            self._wait()
            self._pushed = self._pushing.submit(self._output.push_to_disk)
            self._since_push = 0

    def _wait(self) -> None:
        if self._pushed is not None:
            self._pushed.result()

    def __enter__(self) -> _Copier:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._pushing.shutdown()
        if kind is None:
            self._wait()
