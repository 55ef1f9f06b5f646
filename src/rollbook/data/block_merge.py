"""Plain files of our own rows into one, in a single pass over them.

A block of whole lines is read once. While this thread parses it, a second one takes the SHA-256 of it and a
third writes it; a fourth has the disk begin with what is written, to spare the end. All of these let go of
the interpreter's lock, so two cores are busy all the time.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rollbook.data.job import DataJob
from rollbook.data.line_blocks import LineBlock, line_blocks
from rollbook.data.output import RowOutput
from rollbook.data.quick_check import QuickCheck
from rollbook.data.rows import Advance

_BLOCK = 1 << 20  # the page cache takes larger ones at a third of the speed, measured
_BLOCKS_UNDER_WAY = 4
_PUSH_EVERY = 64 << 20


def merge_blocks(job: DataJob, directory: Path, advance: Advance) -> None:
    """Write all rows of the inputs as they are, with the newline a file may lack; or raise NotQuick."""
    assert job.output is not None
    check = QuickCheck(directory)
    with _Helpers(job.output) as helpers:
        digests = {path: hashlib.sha256() for path in job.paths}
        ring = deque(bytearray(_BLOCK) for _ in range(_BLOCKS_UNDER_WAY))
        for path in job.paths:
            rows = 0
            for block in line_blocks(path, ring=ring):
                is_whole = len(block.data) > block.ends[-1]  # the last line may lack its newline
                helpers.hash_and_write(block, digests[path], is_whole)
                if not is_whole:
                    job.count("newlines_added")
                check.add(block)
                rows += len(block.ends)
                advance(len(block.data))
                helpers.wait_for_a_buffer()
            job.set_rows(path, rows)
        helpers.wait()
        for path, digest in digests.items():
            job.set_digest(path, digest.hexdigest())
        check.finish()


class _Helpers:
    """The threads beside the one that parses; each does its work in order."""

    def __init__(self, output: RowOutput) -> None:
        self._output = output
        self._hashing, self._writing, self._pushing = (
            ThreadPoolExecutor(1, thread_name_prefix=name) for name in ("hash", "write", "push")
        )
        self._under_way: deque[tuple[Future[None], ...]] = deque()
        self._pushed: Future[None] | None = None
        self._since_push = 0

    def hash_and_write(self, block: LineBlock, digest: Any, is_whole: bool) -> None:
        update: Callable[[Any], None] = digest.update
        hashed = self._hashing.submit(update, block.data)
        written = self._writing.submit(self._write, block, is_whole)
        self._under_way.append((hashed, written))

    def wait_for_a_buffer(self) -> None:
        """The next block goes where the oldest of these is."""
        while len(self._under_way) >= _BLOCKS_UNDER_WAY:
            self._settle_oldest()

    def wait(self) -> None:
        while self._under_way:
            self._settle_oldest()

    def __enter__(self) -> _Helpers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for pool in (self._hashing, self._writing, self._pushing):
            pool.shutdown(cancel_futures=kind is not None)
        if kind is None and self._pushed is not None:
            self._pushed.result()

    def _settle_oldest(self) -> None:
        for future in self._under_way.popleft():
            future.result()

    def _write(self, block: LineBlock, is_whole: bool) -> None:
        self._output.write_block(block.data.data, len(block.ends))
        if not is_whole:
            self._output.write_block(b"\n", 0)
        self._since_push += len(block.data)
        if self._since_push >= _PUSH_EVERY and (self._pushed is None or self._pushed.done()):
            if self._pushed is not None:
                self._pushed.result()
            self._pushed = self._pushing.submit(self._output.push_to_disk)
            self._since_push = 0
