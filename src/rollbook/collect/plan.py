"""What there is to do: every row of the input, checked before anything is sent.

Checking gives each row its identity and notes where some of them begin; a digest is taken that says later
whether the input is still the same. A few bytes a row are kept, so a million rows cost what a thousand cost.
The first request does not wait for numpy: only what is done already, or stands twice, is looked up with it.
"""

from __future__ import annotations

import hashlib
import threading
from bisect import bisect_right
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from rollbook.collect.input_check import InputCheck, all_problems, unreadable
from rollbook.collect.input_rows import decode_row, task_id
from rollbook.collect.rows import Item
from rollbook.errors import BadFileError, UsageError
from rollbook.records.jsonl import Line, read_lines

if TYPE_CHECKING:
    from rollbook.collect.journal import Flags
    from rollbook.records.row_blocks import Ints

_HASH_CHUNK = 1 << 22
_ROWS_AT_ONCE = 1 << 12
_BYTES_A_HASH = 8


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
        found = check.result()
        self._hashes, self._places = found.hashes, found.places
        self.foreign_agents = sorted(found.foreign_agents)  # named by rows and not known here
        self._digest.begin()
        if found.has_repeats:
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
        return len(self._hashes) // _BYTES_A_HASH

    @property
    def expected(self) -> int:
        return self.rows * self.repeats

    def task_id(self, row: int, line: bytes) -> str:
        return self._named.get(row) or task_id(decode_row(line), line)

    def items(self, done: Flags | None) -> Iterator[Item]:
        """What is left, in input order, all repeats of a row together; `done` is None where nothing is."""
        if done is None:
            for row, line in zip(range(self.rows), _rows(self.file), strict=False):
                name = self.task_id(row, line.data)
                for repeat in range(self.repeats):
                    yield Item(row, repeat, name, line.data)
        elif not done.all():
            yield from self._missing(done)

    def _missing(self, done: Flags) -> Iterator[Item]:
        first = int(done.argmin()) // self.repeats
        lines = self._lines(first)
        for start in range(first, self.rows, _ROWS_AT_ONCE):
            left = (~done[start : start + _ROWS_AT_ONCE]).sum(axis=1).tolist()
            for row, (count, line) in enumerate(zip(left, lines, strict=False), start):
                if not count:
                    continue
                name = self.task_id(row, line.data)
                whole = count == self.repeats
                for repeat in range(self.repeats) if whole else (~done[row]).nonzero()[0].tolist():
                    yield Item(row, repeat, name, line.data)

    def id_of(self, row: int) -> str:
        """The id of one row, read from the file."""
        return self._named.get(row) or self.task_id(row, next(self._lines(row)).data)

    def _lines(self, row: int) -> Iterator[Line]:
        """From that row on: it is looked for from the last one before it whose place is known."""
        known, start = self._places[bisect_right(self._places, row, key=lambda place: place[0]) - 1]
        return islice(_rows(self.file, start), row - known, None)

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
        import numpy as np

        hashes = np.frombuffer(self._hashes, dtype=np.int64)
        order = np.argsort(hashes, kind="stable")
        hashes = hashes[order]
        place = np.searchsorted(hashes, wanted)
        place[place == len(hashes)] = 0
        return np.where(hashes[place] == wanted, order[place], -1)

    def _suffix_repeated_rows(self) -> None:
        """Rows without an id may say the same twice: the second one is `row-...~2`. Ids may not."""
        import numpy as np

        hashes = np.frombuffer(self._hashes, dtype=np.int64).copy()
        in_order = np.sort(hashes)
        repeated = set(in_order[1:][in_order[1:] == in_order[:-1]].tolist())
        seen: dict[str, int] = {}
        lines: dict[str, int] = {}
        problems: list[tuple[int, str]] = []
        for index, line in enumerate(_rows(self.file)):
            if index >= self.rows:
                break
            if hashes[index] not in repeated:
                continue
            row = decode_row(line.data)
            name = task_id(row, line.data)
            if name in lines and (row.is_named):
                problems.append((line.number, f"the id {name!r} stands on line {lines[name]} already"))
            lines.setdefault(name, line.number)
            seen[name] = seen.get(name, 0) + 1
            if seen[name] > 1:
                self._named[index] = f"{name}~{seen[name]}"
                hashes[index] = hash(self._named[index])
        if problems:
            raise UsageError(all_problems(self.path, problems))
        self._hashes = hashes.tobytes()


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
