"""The input of a collection: its rows, all checked before anything is sent, and the id of each.

One pass decodes every row far enough to know that it makes a request, and takes a digest of the file. 8 bytes
a row are kept (a hash of its id), so a million rows cost what a thousand cost.
"""

from __future__ import annotations

import hashlib
import shlex
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import orjson
import xxhash

from rollbook.collect.input_rows import Agents, Names, all_problems, checker, problem
from rollbook.collect.items import Item
from rollbook.envs.dataset_rows import read_dataset_row
from rollbook.errors import BadFileError, UsageError
from rollbook.records.columns import USUAL, Columns
from rollbook.records.identity import KEY, OWN_IDS, content_id, marked_id, numbered_id, task_digest, task_id
from rollbook.records.json_array import elements, is_array
from rollbook.records.plain import encode_exactly
from rollbook.records.record import decode_exactly

Hashes = np.ndarray[Any, np.dtype[np.uint64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]  # (rows, repeats)
Places = np.ndarray[Any, np.dtype[np.int64]]
_BUFFER = 1 << 20
_MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_NO_CONVERSATION = (KeyError, TypeError, ValueError, AttributeError)
_READY = b'"responses_create_params"'
_COMPRESSED = {b"\x1f\x8b": "zcat", b"BZh": "bzcat", b"\xfd7zXZ": "xzcat", b"\x28\xb5\x2f\xfd": "zstdcat"}


class Input:
    """The rows of a file: lines, or the elements of an array, in any of the usual shapes."""

    def __init__(self, path: Path, file: Path, columns: Columns = USUAL) -> None:
        self.path = path  # as it was typed, for people
        self.file = file
        self.assumed: set[str] = set()  # what was taken for what in rows without parameters
        self._columns = columns
        self._is_array = file.is_file() and is_array(file)
        self.size, self.sha256 = 0, ""
        self.foreign_agents: set[str] = set()  # named by rows, and not in the config
        self.hashes: Hashes = np.empty(0, dtype=np.uint64)
        self.with_digests = True  # in the lines of the output
        self.sharing: list[str] = []  # names of rows that share their id with another task
        self._renamed: dict[int, str] = {}  # rows that are told apart from an earlier one
        self._name_of: Callable[[bytes], str] = _name

    @property
    def rows(self) -> int:
        return len(self.hashes)

    def items(self, repeats: int, done: Flags | None = None) -> Iterator[Item]:
        """What is not done yet, in input order, all repeats of a row together."""
        missing: Iterable[int] = range(self.rows)
        if done is not None:
            missing = map(int, np.flatnonzero(~done.all(axis=1)))
        with self._open() as file:
            lines, at = self._rows(file), 0
            for row in missing:
                _, line = next(islice(lines, row - at, None), (0, b""))
                at = row + 1
                line, name = self._named(row, line)
                for repeat in range(repeats):
                    if done is None or not done[row, repeat]:
                        yield Item(row, repeat, name, line, self.with_digests)

    def find(self, wanted: Hashes) -> Places:
        """The row of each id, given by its hash; -1 where the input has no row of that id.

        An output that was begun before 0.2 goes on with the names it has.
        """
        places = _places(wanted, self.hashes)
        if (places < 0).any() and self._name_of is _name:
            older = Input(self.path, self.file, self._columns)
            older._name_of = _name_before
            older._name_rows(self.rows)
            if (_places(wanted[places < 0], older.hashes) >= 0).any():
                self.hashes, self._renamed, self._name_of = older.hashes, older._renamed, _name_before
                return _places(wanted, self.hashes)
        return places

    def begins_with(self, size: int, sha256: str) -> bool:
        """Whether the file is the one with that digest, or that one with rows added at its end."""
        if (size, sha256) == (self.size, self.sha256):
            return True
        if size > self.size:
            return False
        sha, chunk = hashlib.sha256(), b"\n"
        with self._open() as file:
            while size > 0 and (chunk := file.read(min(size, _BUFFER))):
                sha.update(chunk)
                size -= len(chunk)
            # Without its last newline, the last row may have been lengthened, not followed.
            ends_a_row = chunk.endswith(b"\n") or file.read(1) in (b"\n", b"\r", b"")
        return ends_a_row and sha.hexdigest() == sha256

    def read(self, limit: int | None, agents: Agents) -> None:
        """Check the rows up to the limit and refuse all bad ones together; take the digest of the file."""
        check, problems = checker(agents, self.foreign_agents), []
        hashes, sha = array("Q"), hashlib.sha256()
        with self._open() as file:
            for number, line in self._numbered(file):
                if not self._is_array:
                    sha.update(line)
                    self.size += len(line)
                if line.isspace():
                    continue
                try:
                    check(line := self._as_row(line))
                    hashes.append(hash_of(self._name_of(line)))
                except (UsageError, *_MALFORMED) as error:
                    problems.append((number, problem(self.path, line, error)))
                if len(hashes) == limit:
                    break
            while chunk := file.read(_BUFFER):
                sha.update(chunk)
                self.size += len(chunk)
        if problems:
            raise UsageError(self._all_problems(problems))
        if not hashes:
            raise UsageError(f"{self.path} has no rows")
        self.sha256, self.hashes = sha.hexdigest(), np.array(hashes, dtype=np.uint64)
        self._tell_apart()

    def _name_rows(self, rows: int) -> None:
        with self._open() as file:
            names = (self._name_of(self._as_row(line)) for _, line in islice(self._rows(file), rows))
            self.hashes = np.fromiter(map(hash_of, names), dtype=np.uint64)
        self._tell_apart()

    def _tell_apart(self) -> None:
        """Rows that have one name: by what they show, then by their order. The same task twice is refused."""
        unique, counts = np.unique(self.hashes, return_counts=True)
        if len(unique) == self.rows:
            return
        repeated = set(unique[counts > 1].tolist())
        seen: Counter[str] = Counter()
        first: dict[str, str | None] = {}  # what the first row of an id shows
        lines: dict[tuple[str, str], int] = {}
        problems: list[tuple[int, str]] = []
        with self._open() as file:
            for place, (number, line) in enumerate(islice(self._rows(file), self.rows)):
                if int(self.hashes[place]) not in repeated:
                    continue
                line = self._as_row(line)
                own, row = self._name_of(line), decode_exactly(line)
                has_id = _has_id(line)
                digest = task_digest(row) if has_id else None
                name = own if first.setdefault(own, digest) == digest else marked_id(own, digest)
                seen[name] += 1
                if has_id:
                    same = (own, content_id({key: row[key] for key in row if key not in (KEY, *OWN_IDS)}))
                    if lines.setdefault(same, number) != number:
                        where = f"{self._unit} {lines[same]}"
                        problems.append((number, f"the id {own!r} is already on {where}"))
                free = numbered_id(name, seen[name])
                while free != own and _places(np.array([hash_of(free)], np.uint64), unique)[0] >= 0:
                    seen[name] += 1
                    free = numbered_id(name, seen[name])
                if free != own:
                    self._renamed[place] = free
                    self.hashes[place] = hash_of(free)
                    self.sharing += [free] if has_id else []
        if problems:
            raise UsageError(self._all_problems(problems))

    def _named(self, row: int, line: bytes) -> tuple[bytes, str]:
        """The row as it is sent, and its name."""
        try:
            line = self._as_row(line)
            name = self._renamed.get(row) or self._name_of(line)
            if hash_of(name) == self.hashes[row]:
                return line, name
        except (orjson.JSONDecodeError, UsageError, *_MALFORMED):
            pass
        why = f"row {row + 1} changed while it was collected; restore it and rerun the same command to resume"
        raise BadFileError(self.path, why)

    @property
    def _unit(self) -> str:
        return "element" if self._is_array else "line"

    def _all_problems(self, problems: list[tuple[int, str]]) -> str:
        return all_problems(
            f"{self.path}: element " if self._is_array else f"{self.path}:", self._unit, problems
        )

    def _numbered(self, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        if self._is_array:
            return ((element.number, element.line) for element in elements(self.file))
        return enumerate(file, 1)

    def _rows(self, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        """What holds something, with its number, as it is in the file; blank lines are no rows."""
        numbered = self._numbered(file)
        return ((number, line.rstrip(b"\n")) for number, line in numbered if not line.isspace())

    def _as_row(self, line: bytes) -> bytes:
        """A row of an ordinary dataset as one with parameters; any other, and what is none, as it is."""
        if self._columns == USUAL and _READY in line:
            return line
        try:
            value = decode_exactly(line)
            if not isinstance(value, dict):
                return line
            found = read_dataset_row(value, self._columns)
        except _NO_CONVERSATION as error:
            if self._columns == USUAL:
                return line  # the check says what is wrong
            raise UsageError(str(error.args[0] if error.args else error)) from None
        if (assumed := found.assumed) is not None:
            self.assumed.add(assumed)
        return encode_exactly(found.with_params)

    def _open(self) -> BinaryIO:
        try:
            return self.file.open("rb", buffering=_BUFFER)
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            why = "no such file" if missing else f"cannot be read: {error.strerror}"
            raise UsageError(f"{self.path}: {why} (input_jsonl_fpath)") from None


def read_input(
    path: Path,
    *,
    file: Path | None = None,
    limit: int | None = None,
    agents: Agents = Agents(),  # noqa: B008
    columns: Columns = USUAL,
) -> Input:
    """The checked input. `path` is for people, as it was typed; `file` is where it is, unless it is there."""
    file = (file or path).absolute()  # for good: an environment may go to another directory
    _refuse_what_is_no_text(path, file)
    found = Input(path, file, columns)
    found.read(limit, agents)
    return found


def hash_of(name: str) -> int:
    """64 bits of an id, the same in every process."""
    return xxhash.xxh3_64_intdigest(name.encode(errors="surrogatepass"))


_decode_names: Callable[[bytes], Names] = msgspec.json.Decoder(Names).decode


def _has_id(line: bytes) -> bool:
    names = _decode_names(line)
    return isinstance(names.key, str) or names.task_id is not None or names.id is not None


def _name(line: bytes) -> str:
    names = _decode_names(line)
    if not isinstance(names.key, str) and (names.task_id is not None or names.id is not None):
        return str(names.id if names.task_id is None else names.task_id)  # without decoding the rest
    return task_id(decode_exactly(line))


def _name_before(line: bytes) -> str:
    """As collections named a row before 0.2."""
    names = _decode_names(line)
    given = names.id if names.task_id is None else names.task_id
    return content_id(orjson.loads(line)) if given is None else str(given)


def _places(wanted: Hashes, hashes: Hashes) -> Places:
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    place = np.minimum(np.searchsorted(ordered, wanted), len(ordered) - 1)
    return np.where(ordered[place] == wanted, order[place], -1)


def _refuse_what_is_no_text(path: Path, file: Path) -> None:
    """Refuse pipes, which can be read only once, and compressed files."""
    if file.is_fifo():
        raise UsageError(
            f"{path} is a pipe, and the input is read more than once; write it to a file first: "
            "... > tasks.jsonl (input_jsonl_fpath)"
        )
    if not file.is_file():
        return  # opening it says why
    with file.open("rb") as opened:
        begin = opened.read(max(map(len, _COMPRESSED)))
    for magic, command in _COMPRESSED.items():
        if begin.startswith(magic):
            plain = path.with_suffix("") if path.suffix != ".jsonl" else path.with_name(f"plain_{path.name}")
            typed = f"{command} {shlex.quote(str(path))} > {shlex.quote(str(plain))}"
            raise UsageError(f"{path} is compressed; type {typed} (input_jsonl_fpath)")
