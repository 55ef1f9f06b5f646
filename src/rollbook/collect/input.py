"""The input of a collection: its rows, all checked before anything is sent, and the id of each.

One pass decodes every row far enough to know that it makes a request, and takes a digest of the file. 8 bytes
a row are kept (a hash of its id), so a million rows cost what a thousand cost.
"""

from __future__ import annotations

import codecs
import hashlib
import shlex
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple

import msgspec
import numpy as np
import orjson
import xxhash

from rollbook.collect.items import Item
from rollbook.errors import BadFileError, UsageError
from rollbook.records.row_keys import content_id

Hashes = np.ndarray[Any, np.dtype[np.uint64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]  # (rows, repeats)
Places = np.ndarray[Any, np.dtype[np.int64]]
A_GOOD_ROW = (
    '{"id": "sum-1", "responses_create_params": {"input": [{"role": "user", "content": "What is 2 + 2?"}]}, '
    '"expected_answer": "4"}'
)
_SHOWN_PROBLEMS = 20
_BUFFER = 1 << 20
_LACKS = "it has no"
_MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_COMPRESSED = {b"\x1f\x8b": "zcat", b"BZh": "bzcat", b"\xfd7zXZ": "xzcat", b"\x28\xb5\x2f\xfd": "zstdcat"}


class _Array(msgspec.Struct, array_like=True, gc=False):
    """An array whose items are checked to be JSON and skipped: keeping them takes three times as long."""


class _Object(msgspec.Struct, gc=False):
    """The same for an object."""


class _InputItem(msgspec.Struct, gc=False):
    """One item of a conversation. An item of another type would be left out of the request."""

    type: (
        Literal[
            "message",
            "reasoning",
            "function_call",
            "custom_tool_call",
            "function_call_output",
            "custom_tool_call_output",
        ]
        | None
    ) = None


class _OtherParams(msgspec.Struct, gc=False):
    instructions: str | None = None
    tools: _Array | None = None
    metadata: _Object | None = None


class _Params(_OtherParams, kw_only=True, gc=False):
    input: str | Annotated[list[_InputItem], msgspec.Meta(min_length=1)]


class _AnyParams(_OtherParams, kw_only=True, gc=False):
    input: str | _Array


class _Names(msgspec.Struct, gc=False):
    task_id: str | int | None = None
    id: str | int | None = None

    @property
    def own_id(self) -> str | None:
        given = self.id if self.task_id is None else self.task_id
        return None if given is None else str(given)


class _Row(_Names, kw_only=True, gc=False):
    responses_create_params: _Params
    agent_ref: Any = None

    @property
    def agent(self) -> str | None:
        """The agent that the row is meant for, where it says so."""
        name = self.agent_ref.get("name") if isinstance(self.agent_ref, dict) else None
        return name if isinstance(name, str) else None


class _RowForAServer(_Row, kw_only=True, gc=False):
    """A row that an agent server gets as it is."""

    responses_create_params: _AnyParams  # type: ignore[assignment]


class Agents(NamedTuple):
    """The agent that does the rows, and the others of the config, whose rows it must not do."""

    name: str = ""
    env: Mapping[str, Any] = {}
    others: frozenset[str] = frozenset()


class Input:
    """The rows of a file."""

    def __init__(self, path: Path, file: Path) -> None:
        self.path = path  # as it was typed, for people
        self.file = file
        self.size, self.sha256 = 0, ""
        self.foreign_agents: set[str] = set()  # named by rows, and not in the config
        self.hashes: Hashes = np.empty(0, dtype=np.uint64)
        self._renamed: dict[int, str] = {}  # rows without an id that say what an earlier one says

    @property
    def rows(self) -> int:
        return len(self.hashes)

    def items(self, repeats: int, done: Flags | None = None) -> Iterator[Item]:
        """What is not done yet, in input order, all repeats of a row together."""
        missing: Iterable[int] = range(self.rows)
        if done is not None:
            missing = map(int, np.flatnonzero(~done.all(axis=1)))
        with self._open() as file:
            lines, at = _rows(file), 0
            for row in missing:
                _, line = next(islice(lines, row - at, None), (0, b""))
                at = row + 1
                name = self._task_id(row, line)
                for repeat in range(repeats):
                    if done is None or not done[row, repeat]:
                        yield Item(row, repeat, name, line)

    def find(self, wanted: Hashes) -> Places:
        """The row of each id, given by its hash; -1 where the input has no row of that id."""
        order = np.argsort(self.hashes, kind="stable")
        ordered = self.hashes[order]
        place = np.minimum(np.searchsorted(ordered, wanted), len(ordered) - 1)
        return np.where(ordered[place] == wanted, order[place], -1)

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
        check, problems = _checker(agents, self.foreign_agents), []
        hashes, sha = array("Q"), hashlib.sha256()
        with self._open() as file:
            for number, line in enumerate(file, 1):
                sha.update(line)
                self.size += len(line)
                if line.isspace():
                    continue
                try:
                    row = check(line)
                    hashes.append(hash_of(_task_id(row, line)))
                except (UsageError, *_MALFORMED) as error:
                    problems.append((number, _problem(self.path, line, error)))
                if len(hashes) == limit:
                    break
            while chunk := file.read(_BUFFER):
                sha.update(chunk)
                self.size += len(chunk)
        if problems:
            raise UsageError(_all_problems(self.path, problems))
        if not hashes:
            raise UsageError(f"{self.path} has no rows")
        self.sha256, self.hashes = sha.hexdigest(), np.array(hashes, dtype=np.uint64)
        self._tell_apart()

    def _tell_apart(self) -> None:
        """Rows without an id may say the same twice: the second one is `row-...~2`. Ids may not."""
        unique, counts = np.unique(self.hashes, return_counts=True)
        if len(unique) == self.rows:
            return
        repeated = set(unique[counts > 1].tolist())
        seen: Counter[str] = Counter()
        first_line: dict[str, int] = {}
        problems: list[tuple[int, str]] = []
        with self._open() as file:
            for row, (number, line) in enumerate(islice(_rows(file), self.rows)):
                if int(self.hashes[row]) not in repeated:
                    continue
                names = _decode_names(line)
                name = _task_id(names, line)
                seen[name] += 1
                if seen[name] > 1 and names.own_id is not None:
                    why = f"the id {name!r} is already on line {first_line[name]}"
                    problems.append((number, why))
                elif seen[name] > 1:
                    self._renamed[row] = f"{name}~{seen[name]}"
                    self.hashes[row] = hash_of(self._renamed[row])
                first_line.setdefault(name, number)
        if problems:
            raise UsageError(_all_problems(self.path, problems))

    def _task_id(self, row: int, line: bytes) -> str:
        try:
            name = self._renamed.get(row) or _task_id(_decode_names(line), line)
            if hash_of(name) == self.hashes[row]:
                return name
        except (orjson.JSONDecodeError, *_MALFORMED):
            pass
        why = f"row {row + 1} changed while it was collected; restore it and rerun the same command to resume"
        raise BadFileError(self.path, why)

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
) -> Input:
    """The checked input. `path` is for people, as it was typed; `file` is where it is, unless it is there."""
    file = (file or path).absolute()  # for good: an environment may go to another directory
    _refuse_what_is_no_text(path, file)
    found = Input(path, file)
    found.read(limit, agents)
    return found


def hash_of(name: str) -> int:
    """64 bits of an id, the same in every process."""
    return xxhash.xxh3_64_intdigest(name.encode(errors="surrogatepass"))


_decode_names: Callable[[bytes], _Names] = msgspec.json.Decoder(_Names).decode


def _task_id(names: _Names, line: bytes) -> str:
    return content_id(orjson.loads(line)) if names.own_id is None else names.own_id


def _rows(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The lines that hold something, with their numbers; blank ones are no rows."""
    return ((number, line.rstrip(b"\n")) for number, line in enumerate(file, 1) if not line.isspace())


def _checker(agents: Agents, foreign: set[str]) -> Callable[[bytes], _Row]:
    """Decodes one row, or raises what is wrong with it."""
    decode = msgspec.json.Decoder(_row_type(agents.env)).decode

    def check(line: bytes) -> _Row:
        if not line.isascii():
            line.decode()  # msgspec does not look into text that it skips
        row: _Row = decode(line)
        if (agent := row.agent) is not None and agent != agents.name:
            if agent in agents.others:
                raise UsageError(
                    f"its agent_ref names {agent!r}; collect such rows apart, with agent_name={agent}"
                )
            foreign.add(agent)
        return row

    return check


def _row_type(env: Mapping[str, Any]) -> Any:
    """What a row must hold for this environment."""
    if env.get("name") == "gym":
        return _RowForAServer
    if env.get("name") == "dataset" and env.get("grader") != "regex":  # which has several places for it
        key, _, _ = str(env.get("answer_key", "expected_answer")).partition(".")
        if key not in _Row.__struct_fields__:
            answer = ("answer", str | bool | int | float | list[Any] | dict[str, Any])
            return msgspec.defstruct("Row", [answer], bases=(_Row,), rename={"answer": key}, kw_only=True)
    return _Row


def _problem(path: Path, line: bytes, error: Exception) -> str:
    if line.startswith(codecs.BOM_UTF8):
        remove = rf"sed -i '1s/^\xEF\xBB\xBF//' {path}"
        return f"begins with a byte order mark; remove it: {remove}"
    text = str(error).replace("`$.", "`").replace("Object missing", _LACKS)
    if text.startswith("Invalid enum value"):
        text = f"an item of an unknown type: {text.removeprefix('Invalid enum value ')}"
    return f"{text[:1].lower()}{text[1:]}"


def _all_problems(path: Path, problems: list[tuple[int, str]]) -> str:
    """The first problems in full, with an example of a good row, and the lines of the others."""
    listed = [f"{path}:{line}: {text}" for line, text in problems[:_SHOWN_PROBLEMS]]
    for place, (_, text) in enumerate(problems[:_SHOWN_PROBLEMS]):
        if text.startswith(_LACKS):
            listed[place] += f"; a good row is like this: {A_GOOD_ROW}"
            break
    if others := [line for line, _ in problems[_SHOWN_PROBLEMS:]]:
        listed.append(f"... and {len(others)} more: lines {_runs(others)}")
    count = "1 row" if len(problems) == 1 else f"{len(problems)} rows"
    return "\n  ".join([f"{count} of the input cannot be used, so nothing was sent:", *listed])


def _runs(lines: list[int]) -> str:
    """3, 7-12: rising numbers, those next to each other together."""
    runs: list[list[int]] = []
    for line in lines:
        if runs and line == runs[-1][1] + 1:
            runs[-1][1] = line
        else:
            runs.append([line, line])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


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
