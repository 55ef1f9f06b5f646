"""What there is to do: every row of the input, checked before anything is sent.

Checking gives each row its identity and notes where it begins; a digest is taken that says later whether the
input is still the same. A few bytes a row are kept, so a million rows cost what a thousand cost.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rollbook.collect.input_check import (
    InputCheck,
    all_problems,
    decode_row,
    task_id,
    unreadable,
)
from rollbook.collect.rows import Item
from rollbook.errors import BadFileError, UsageError
from rollbook.records.jsonl import Line, read_lines
from rollbook.records.row_blocks import Ints

_HASH_CHUNK = 1 << 22
_ROWS_AT_ONCE = 1 << 12

Flags = np.ndarray[Any, np.dtype[np.bool_]]  # (rows, repeats)


class Plan:
    """The rows of an input file and their repeats."""

    def __init__(
        self,
        path: Path,
        *,
        limit: int | None,
        repeats: int,
        check: InputCheck | None = None,
        digest_can_wait: bool = False,
    ) -> None:
        """`check` is that of the same file and limit, where it was begun before.

        The digest is taken beside the check, or after it if it can wait.
        """
        self.path = path  # as it was typed, for people
        self.repeats = repeats
        self._named: dict[int, str] = {}  # the ids of rows whose content hash needs a suffix
        check = check or InputCheck(path, limit)
        self.file = check.file
        self._digest = _Digest(self.file)
        if not digest_can_wait:
            self._digest.begin()
        self._starts, self._hashes = check.result()
        self.foreign_agents = sorted(check.foreign_agents)  # named by rows and not known here
        self._digest.begin()
        self._suffix_repeated_rows()

    @property
    def sha256(self) -> str:
        """Of the input; waits for it."""
        return self._digest.result()[0]

    @property
    def size(self) -> int:
        return self._digest.result()[1]

    @property
    def rows(self) -> int:
        return len(self._starts)

    @property
    def expected(self) -> int:
        return self.rows * self.repeats

    def task_id(self, row: int, line: bytes) -> str:
        return self._named.get(row) or task_id(decode_row(line), line)

    def items(self, done: Flags) -> Iterator[Item]:
        """What is left, in input order, all repeats of a row together."""
        if done.all():
            return
        first = int(np.argmin(done)) // self.repeats
        lines = _rows(self.file, int(self._starts[first]))
        for start in range(first, self.rows, _ROWS_AT_ONCE):
            left = np.count_nonzero(~done[start : start + _ROWS_AT_ONCE], axis=1).tolist()
            for row, (count, line) in enumerate(zip(left, lines, strict=False), start):
                if not count:
                    continue
                name = self.task_id(row, line.data)
                whole = count == self.repeats
                for repeat in range(self.repeats) if whole else np.flatnonzero(~done[row]).tolist():
                    yield Item(row, repeat, name, line.data)

    def id_of(self, row: int) -> str:
        """The id of one row, read from the file."""
        return self._named.get(row) or self.task_id(row, next(_rows(self.file, int(self._starts[row]))).data)

    def begins_with(self, size: int, sha256: str) -> bool:
        """Whether the file is the one of that digest, or that one with rows added at its end."""
        if (size, sha256) == (self.size, self.sha256):
            return True
        if size > self.size:
            return False
        sha, chunk = hashlib.sha256(), b"\n"
        with self.file.open("rb", buffering=0) as file:
            while size > 0 and (chunk := file.read(min(size, _HASH_CHUNK))):
                sha.update(chunk)
                size -= len(chunk)
            # Without its last newline, the last row may have been lengthened, not followed.
            ends_a_row = chunk.endswith(b"\n") or file.read(1) in (b"\n", b"\r", b"")
        return ends_a_row and sha.hexdigest() == sha256

    def find(self, wanted: Ints) -> Ints:
        """The row of each id, given by its hash; -1 where the input has none of that name."""
        if not len(wanted):
            return wanted
        order = np.argsort(self._hashes, kind="stable")
        hashes = self._hashes[order]
        place = np.searchsorted(hashes, wanted)
        place[place == len(hashes)] = 0
        return np.where(hashes[place] == wanted, order[place], -1)

    def _suffix_repeated_rows(self) -> None:
        """Rows without an id may say the same twice: the second one is `row-...~2`. Ids may not."""
        in_order = np.sort(self._hashes)
        repeated = set(in_order[1:][in_order[1:] == in_order[:-1]].tolist())
        if not repeated:
            return
        seen: dict[str, int] = {}
        lines: dict[str, int] = {}
        problems: list[str] = []
        for index, line in enumerate(_rows(self.file)):
            if index >= self.rows:
                break
            if self._hashes[index] not in repeated:
                continue
            row = decode_row(line.data)
            name = task_id(row, line.data)
            if name in lines and (row.is_named):
                problems.append(
                    f"{self.path}:{line.number}: the id {name!r} stands on line {lines[name]} already"
                )
            lines.setdefault(name, line.number)
            seen[name] = seen.get(name, 0) + 1
            if seen[name] > 1:
                self._named[index] = f"{name}~{seen[name]}"
                self._hashes[index] = hash(self._named[index])
        if problems:
            raise UsageError(all_problems(problems))


class _Digest:
    """The sha256 of a file, taken in a thread (hashing releases the interpreter)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sha = hashlib.sha256()
        self._bytes = 0
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None

    def begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._take, daemon=True)
            self._thread.start()

    def _take(self) -> None:
        try:
            with self._path.open("rb", buffering=0) as file:
                while chunk := file.read(_HASH_CHUNK):
                    self._sha.update(chunk)
                    self._bytes += len(chunk)
        except OSError as error:
            self._error = error

    def result(self) -> tuple[str, int]:
        assert self._thread is not None
        self._thread.join()
        if self._error is not None:
            raise BadFileError(self._path, f"cannot be read: {self._error.strerror}")
        return self._sha.hexdigest(), self._bytes


def _rows(path: Path, start: int = 0) -> Iterator[Line]:
    """The lines that hold something; blank ones are no rows."""
    try:
        for line in read_lines(path, start=start, accept_tail=True):
            if line.data and not line.data.isspace():
                yield line
    except OSError as error:
        raise unreadable(path, error) from None
