"""Every row of an input checked before anything is sent, by all cores where the file is large.

One pass finds every malformed row, where each row begins, and a hash of its id. A file of many megabytes is
cut at line ends into parts, and copies of this process (which hash as it does) take one after the other, long
before this process has imported all it needs to send something; then it takes what is left of them.
"""

from __future__ import annotations

import codecs
import shlex
from array import array
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import orjson

from rollbook.collect.settings import CollectSettings
from rollbook.errors import UsageError
from rollbook.forked import SharedWork
from rollbook.records.jsonl import Line, read_lines
from rollbook.records.row_blocks import Ints, LineBlock, decode_block, line_blocks, line_parts
from rollbook.records.row_keys import content_id

_SHOWN_ERRORS = 20
_PART_BYTES = 2 << 20
_COMPRESSED = {b"\x1f\x8b": "zcat", b"BZh": "bzcat", b"\xfd7zXZ": "xzcat", b"\x28\xb5\x2f\xfd": "zstdcat"}


class _Items(msgspec.Struct, array_like=True, gc=False):
    """An array whose items are checked to be JSON and skipped: keeping them takes three times as long."""


class _Object(msgspec.Struct, gc=False):
    """The same for an object."""


class _Params(msgspec.Struct, gc=False):
    input: str | _Items
    instructions: str | None = None
    tools: _Items | None = None
    metadata: _Object | None = None


class InputRow(msgspec.Struct, gc=False):
    responses_create_params: _Params
    task_id: str | int | None = None
    id: str | int | None = None
    agent_ref: Any = None

    @property
    def is_named(self) -> bool:
        return self.task_id is not None or self.id is not None

    @property
    def agent(self) -> str | None:
        """That the row is meant for, where it says so."""
        name = self.agent_ref.get("name") if isinstance(self.agent_ref, dict) else None
        return name if isinstance(name, str) else None


class _RowById(msgspec.Struct, gc=False):
    """The usual row, known by `id` alone: a name less to look at for each of a million."""

    id: str
    responses_create_params: _Params
    task_id: msgspec.UnsetType = msgspec.UNSET  # so that a row which has one is none of these
    agent_ref: msgspec.UnsetType = msgspec.UNSET


_decoder = msgspec.json.Decoder(InputRow)
decode_row, _decode_rows = _decoder.decode, _decoder.decode_lines
_decode_rows_by_id = msgspec.json.Decoder(_RowById).decode_lines

_MALFORMED = (msgspec.MsgspecError, orjson.JSONDecodeError, RecursionError)


class Agents(NamedTuple):
    """Which agent does the rows, and which others there are, whose rows it must not do."""

    asked: str = ""
    others: frozenset[str] = frozenset()


class Part(NamedTuple):
    """What a pass over a part of the file found; line numbers count from the part's first line."""

    starts: array[int]
    hashes: array[int]
    problems: list[tuple[int, str]]
    foreign: set[str]  # agents that are named by rows and not known here
    lines: int


class InputCheck:
    """A check that begins at once; the copies work on while this process does something else first."""

    def __init__(
        self, path: Path, limit: int | None, *, file: Path | None = None, agents: Agents | None = None
    ) -> None:
        """`path` is for people, as it was typed; `file` is where it is, unless it is there."""
        self.path, self._limit, self._agents = path, limit, agents or Agents()
        self.foreign_agents: set[str] = set()  # once there is a result: named by rows and not known here
        self.file = file or path.absolute()  # for good: an environment may go to another directory
        _refuse_what_is_no_text(path, self.file)
        self._parts: list[tuple[int, int | None]] = [(0, None)]
        if limit is None:
            with suppress(OSError):  # told by the check itself
                self._parts = [*line_parts(self.file, _PART_BYTES)]
        self._work = SharedWork(self._check, len(self._parts))

    def result(self) -> tuple[Ints, Ints]:
        """Where each row begins, and the hash of its id, good within this process."""
        parts, problems, number = self._work.result(), [], 1
        for part in parts:
            problems += [f"{self.path}:{number + line}: {text}" for line, text in part.problems]
            self.foreign_agents |= part.foreign
            number += part.lines
        if problems:
            raise UsageError(all_problems(problems))
        starts = np.concatenate([np.asarray(part.starts, dtype=np.int64) for part in parts])
        if not len(starts):
            raise UsageError(f"{self.path} has no rows")
        return starts, np.concatenate([np.asarray(part.hashes, dtype=np.int64) for part in parts])

    def close(self) -> None:
        """Let go of it, whether it is done or not."""
        self._work.close()

    def _check(self, index: int) -> Part:
        try:
            return check_part(self.file, *self._parts[index], self._limit, self._agents)
        except OSError as error:
            raise unreadable(self.path, error) from None


def begin_check(settings: CollectSettings) -> InputCheck | None:
    """The check of an input, which takes a while, begun; None where the tasks are not made yet."""
    path = settings.input_jsonl_fpath
    return None if path is None else begin_check_of(settings, Path(path))


def begin_check_of(settings: CollectSettings, path: Path, file: Path | None = None) -> InputCheck:
    agents = Agents(settings.agent_name, frozenset(settings.agents) - {settings.agent_name})
    return InputCheck(path, settings.limit, file=file, agents=agents)


def check_part(
    path: Path,
    start: int = 0,
    end: int | None = None,
    limit: int | None = None,
    agents: Agents = Agents(),  # noqa: B008
) -> Part:
    found = Part(array("q"), array("q"), [], set(), 0)
    lines = 0
    for block in line_blocks(path, start=start, end=end):
        if not _take_block(found, block, agents):
            _take_lines(found, path, block, lines, limit, agents)
        lines += len(block.ends)
        if limit is not None and len(found.starts) >= limit:
            del found.starts[limit:], found.hashes[limit:]
            break
    return found._replace(lines=lines)


def _take_block(found: Part, block: LineBlock, agents: Agents) -> bool:
    """The usual case, a block of good rows, without a loop over lines; False when it is not."""
    hashes: Iterable[int]
    if (named := decode_block(block, _decode_rows_by_id)) is not None:
        hashes = map(hash, [row.id for row in named])
    elif (others := decode_block(block, _decode_rows)) is not None:
        named_agents = {agent for row in others if (agent := row.agent)} - {agents.asked}
        if named_agents & agents.others:
            return False
        found.foreign.update(named_agents)
        lines = block.data.tobytes().split(b"\n")
        hashes = [hash(task_id(row, line)) for row, line in zip(others, lines, strict=False)]
    else:
        return False
    found.starts.frombytes((block.starts + block.offset).tobytes())
    found.hashes.frombytes(np.fromiter(hashes, dtype=np.int64, count=len(block.ends)).tobytes())
    return True


def _take_lines(
    found: Part, path: Path, block: LineBlock, before: int, limit: int | None, agents: Agents
) -> None:
    """The same for a block with something odd in it: blank lines, bad rows."""
    end = block.offset + len(block.data)
    for line in read_lines(path, start=block.offset, end=end, number=before, accept_tail=True):
        if not line.data or line.data.isspace():
            continue
        if limit is not None and len(found.starts) >= limit:
            return
        try:
            orjson.loads(line.data)
            row = decode_row(line.data)
        except _MALFORMED as error:
            found.problems.append((line.number, _problem(path, line, error)))
            continue
        if row.agent in agents.others:
            apart = f"collect such rows apart, with agent_name={row.agent}"
            found.problems.append((line.number, f"its agent_ref names {row.agent!r}; {apart}"))
            continue
        if row.agent not in (None, agents.asked):
            found.foreign.add(str(row.agent))
        found.starts.append(line.start)
        found.hashes.append(hash(task_id(row, line.data)))


def _refuse_what_is_no_text(path: Path, file: Path) -> None:
    """Pipes, which can be read only once, and compressed files."""
    try:
        if file.is_fifo():
            raise UsageError(
                f"{path} is a pipe, and the input is read more than once; write it to a file first: "
                "... > tasks.jsonl (input_jsonl_fpath)"
            )
        with file.open("rb") as opened:
            begin = opened.read(max(map(len, _COMPRESSED)))
    except OSError:
        return  # told by the check itself
    for magic, command in _COMPRESSED.items():
        if begin.startswith(magic):
            plain = path.with_suffix("") if path.suffix != ".jsonl" else path.with_name(f"plain_{path.name}")
            typed = f"{command} {shlex.quote(str(path))} > {shlex.quote(str(plain))}"
            raise UsageError(f"{path} is compressed; type {typed} (input_jsonl_fpath)")


def unreadable(path: Path, error: OSError) -> UsageError:
    why = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
    return UsageError(f"{path}: {why} (input_jsonl_fpath)")


def task_id(row: InputRow, line: bytes) -> str:
    given = row.task_id if row.task_id is not None else row.id
    return content_id(orjson.loads(line)) if given is None else str(given)


def _problem(path: Path, line: Line, error: Exception) -> str:
    if line.data.startswith(codecs.BOM_UTF8):
        remove = rf"sed -i '1s/^\xEF\xBB\xBF//' {path}"
        return f"begins with a byte order mark; remove it: {remove}"
    text = str(error).replace("`$.", "`").replace("Object missing", "it has no")
    return f"{text[:1].lower()}{text[1:]}"


def all_problems(problems: list[str]) -> str:
    more = len(problems) - _SHOWN_ERRORS
    listed = "\n  ".join(problems[:_SHOWN_ERRORS] + ([f"... and {more} more"] if more > 0 else []))
    count = "1 row" if len(problems) == 1 else f"{len(problems)} rows"
    return f"{count} of the input cannot be used, so nothing was sent:\n  {listed}"
