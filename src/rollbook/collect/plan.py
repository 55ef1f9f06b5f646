"""What there is to do: every row of the input, checked before anything is sent.

One pass over the file finds every malformed row, gives each row its identity, notes where it begins, and
takes the digest that says later whether the input is still the same. It keeps a few bytes a row, so a
million rows cost what a thousand cost.
"""

from __future__ import annotations

import codecs
import hashlib
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson

from rollbook.collect.rows import Item
from rollbook.errors import UsageError
from rollbook.records.jsonl import Line, read_blocks, read_lines
from rollbook.records.row_keys import content_id

ID_KEYS = ("task_id", "id")
_SHOWN_ERRORS = 20
_HASH_CHUNK = 1 << 22


class _Items(msgspec.Struct, array_like=True, gc=False):
    """An array whose items are checked to be JSON and skipped: keeping them takes three times as long."""


class _Params(msgspec.Struct, gc=False):
    input: str | _Items


class _Row(msgspec.Struct, gc=False):
    responses_create_params: _Params
    task_id: str | int | None = None
    id: str | int | None = None


_decoder = msgspec.json.Decoder(_Row)
_decode_row, _decode_rows = _decoder.decode, _decoder.decode_lines

Flags = np.ndarray[Any, np.dtype[np.bool_]]  # (rows, repeats)
Ints = np.ndarray[Any, np.dtype[np.int64]]
_MALFORMED = (msgspec.MsgspecError, orjson.JSONDecodeError, RecursionError)


class Plan:
    """The rows of an input file and their repeats."""

    def __init__(self, path: Path, *, limit: int | None, repeats: int) -> None:
        self.path = path
        self.repeats = repeats
        digest = _Digest(path)
        self._starts = array("q")  # where each row begins
        self._hashes = array("q")  # a hash of each row's id, good within this process
        self._named: dict[int, str] = {}  # the ids of rows whose content hash needs a suffix
        self._check(limit)
        self.sha256, self.bytes = digest.result()
        self._suffix_repeated_rows()

    @property
    def rows(self) -> int:
        return len(self._starts)

    @property
    def expected(self) -> int:
        return self.rows * self.repeats

    def task_id(self, row: int, line: bytes) -> str:
        return self._named.get(row) or _task_id(_decode_row(line), line)

    def items(self, done: Flags) -> Iterator[Item]:
        """What is left, in input order, all repeats of a row together."""
        left = np.count_nonzero(~done, axis=1)
        open_rows = np.flatnonzero(left)
        if not len(open_rows):
            return
        first = int(open_rows[0])
        untouched = range(self.repeats)
        left_of = left.tolist()
        for row, line in enumerate(_rows(self.path, self._starts[first]), start=first):
            if row >= self.rows:
                return
            if not left_of[row]:
                continue
            task_id = self.task_id(row, line.data)
            whole = left_of[row] == self.repeats
            for repeat in untouched if whole else np.flatnonzero(~done[row]).tolist():
                yield Item(row, repeat, task_id, line.data)

    def id_of(self, row: int) -> str:
        """The id of one row, read from the file."""
        return self._named.get(row) or self.task_id(row, next(_rows(self.path, self._starts[row])).data)

    def begins_with(self, size: int, sha256: str) -> bool:
        """Whether the file is the one of that digest, or that one with rows added at its end."""
        if (size, sha256) == (self.bytes, self.sha256):
            return True
        if size > self.bytes:
            return False
        sha, chunk = hashlib.sha256(), b"\n"
        with self.path.open("rb", buffering=0) as file:
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
        order = np.argsort(np.asarray(self._hashes, dtype=np.int64), kind="stable")
        hashes = np.asarray(self._hashes, dtype=np.int64)[order]
        place = np.searchsorted(hashes, wanted)
        place[place == len(hashes)] = 0
        return np.where(hashes[place] == wanted, order[place], -1)

    def _check(self, limit: int | None) -> None:
        problems: list[str] = []
        number = 1
        for start, block in _blocks(self.path):
            ends = np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == ord("\n"))
            if not self._check_block(start, block, ends):
                problems += self._check_lines(start, number, limit)
            number += len(ends)
            if limit is not None and len(self._starts) >= limit:
                del self._starts[limit:], self._hashes[limit:]
                break
        if problems:
            raise UsageError(_all_problems(problems))
        if not self._starts:
            raise UsageError(f"{self.path} has no rows")

    def _check_block(self, start: int, block: bytes, ends: Ints) -> bool:
        """The usual case, a block of good rows, without a loop over lines; False when it is not."""
        data = np.frombuffer(block, dtype=np.uint8)
        # The decoder takes any white space between rows and within them. Where all newlines stand between
        # `}` and `{` they stand between rows, and as many rows as lines are one a line.
        if block[-1:] != b"\n" or block[:1] != b"{" or np.any(data[ends - 1] != ord("}")):
            return False
        if np.any(data[ends[:-1] + 1] != ord("{")) or not _is_utf8(block):
            return False
        try:
            rows = _decode_rows(block)
        except _MALFORMED:
            return False
        if len(rows) != len(ends):
            return False
        self._starts.append(start)
        self._starts.frombytes((ends[:-1].astype(np.int64) + (start + 1)).tobytes())
        names = [row.id if row.task_id is None else row.task_id for row in rows]
        if None in names:
            pieces = block.split(b"\n")
            self._hashes.extend([hash(_task_id(row, line)) for row, line in zip(rows, pieces, strict=False)])
        else:
            hashes = np.fromiter(map(hash, map(str, names)), dtype=np.int64, count=len(names))
            self._hashes.frombytes(hashes.tobytes())
        return True

    def _check_lines(self, start: int, number: int, limit: int | None) -> list[str]:
        """The same for a block with something odd in it: blank lines, bad rows, no last newline."""
        problems = []
        block = next(_blocks(self.path, start))[1]
        for line in read_lines(
            self.path, start=start, end=start + len(block), number=number, accept_tail=True
        ):
            if not line.data or line.data.isspace():
                continue
            if limit is not None and len(self._starts) >= limit:
                break
            try:
                orjson.loads(line.data)
                row = _decode_row(line.data)
            except _MALFORMED as error:
                problems.append(_problem(self.path, line, error))
                continue
            self._starts.append(line.start)
            self._hashes.append(hash(_task_id(row, line.data)))
        return problems

    def _suffix_repeated_rows(self) -> None:
        """Rows without an id may say the same twice: the second one is `row-...~2`. Ids may not."""
        hashes = np.asarray(self._hashes, dtype=np.int64)
        unique, counts = np.unique(hashes, return_counts=True)
        repeated = set(unique[counts > 1].tolist())
        if not repeated:
            return
        seen: dict[str, int] = {}
        lines: dict[str, int] = {}
        problems: list[str] = []
        for index, line in enumerate(_rows(self.path)):
            if index >= self.rows:
                break
            if self._hashes[index] not in repeated:
                continue
            row = _decode_row(line.data)
            name = _task_id(row, line.data)
            if name in lines and (row.task_id is not None or row.id is not None):
                problems.append(
                    f"{self.path}:{line.number}: the id {name!r} stands on line {lines[name]} already"
                )
            lines.setdefault(name, line.number)
            seen[name] = seen.get(name, 0) + 1
            if seen[name] > 1:
                self._named[index] = f"{name}~{seen[name]}"
                self._hashes[index] = hash(self._named[index])
        if problems:
            raise UsageError(_all_problems(problems))


class _Digest:
    """The sha256 of a file, taken in a thread beside the check (hashing releases the interpreter)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sha = hashlib.sha256()
        self._bytes = 0
        self._thread = threading.Thread(target=self._take, daemon=True)
        self._error: OSError | None = None
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
        self._thread.join()
        if self._error is not None:
            raise UsageError(f"{self._path}: cannot be read: {self._error.strerror}")
        return self._sha.hexdigest(), self._bytes


def _rows(path: Path, start: int = 0) -> Iterator[Line]:
    """The lines that hold something; blank ones are no rows."""
    try:
        for line in read_lines(path, start=start, accept_tail=True):
            if line.data and not line.data.isspace():
                yield line
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> UsageError:
    why = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
    return UsageError(f"{path}: {why} (input_jsonl_fpath)")


def _blocks(path: Path, start: int = 0) -> Iterator[tuple[int, bytes]]:
    try:
        yield from read_blocks(path, start=start)
    except OSError as error:
        raise _unreadable(path, error) from None


def _is_utf8(block: bytes) -> bool:
    """The decoder does not look into fields it skips."""
    try:
        block.decode()
    except UnicodeDecodeError:
        return False
    return True


def _task_id(row: _Row, line: bytes) -> str:
    given = row.task_id if row.task_id is not None else row.id
    return content_id(orjson.loads(line)) if given is None else str(given)


def _problem(path: Path, line: Line, error: Exception) -> str:
    if line.data.startswith(codecs.BOM_UTF8):
        remove = rf"sed -i '1s/^\xEF\xBB\xBF//' {path}"
        return f"{path}:{line.number}: begins with a byte order mark; remove it: {remove}"
    text = str(error).replace("`$.", "`").replace("Object missing", "it has no")
    return f"{path}:{line.number}: {text[:1].lower()}{text[1:]}"


def _all_problems(problems: list[str]) -> str:
    more = len(problems) - _SHOWN_ERRORS
    listed = "\n  ".join(problems[:_SHOWN_ERRORS] + ([f"... and {more} more"] if more > 0 else []))
    count = "1 row" if len(problems) == 1 else f"{len(problems)} rows"
    return f"{count} of the input cannot be used, so nothing was sent:\n  {listed}"
