"""One pass over an input, before anything is sent: what is malformed, and a hash of the id of every row.

A file of many megabytes is cut at line ends into parts, and copies of this process (which hash as it does)
take one after the other.
"""

from __future__ import annotations

import codecs
from array import array
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import orjson

from rollbook.collect.input_rows import A_GOOD_ROW, Agents, Checked, InputRow, Params, task_id
from rollbook.forked import SharedWork, is_alone
from rollbook.records.row_blocks import LineBlock, decode_block, line_blocks, line_parts

if TYPE_CHECKING:
    from rollbook.records.jsonl import Line

_PART_BYTES = 2 << 20


class _RowById(msgspec.Struct, gc=False):
    """The usual row, known by `id` alone: a name less to look at for each of a million."""

    id: str
    responses_create_params: Params
    task_id: msgspec.UnsetType = msgspec.UNSET  # so that a row which has one is none of these
    agent_ref: msgspec.UnsetType = msgspec.UNSET


class _Decoders(NamedTuple):
    one: Callable[[bytes], InputRow]
    lines: Callable[[memoryview], list[InputRow]]
    lines_by_id: Callable[[memoryview], list[_RowById]]


@cache
def _decoders(needed: str | None) -> _Decoders:
    """Of rows that have this field as well, whatever but null stands in it."""
    row, by_id = (msgspec.json.Decoder(_with(needed, kind)) for kind in (InputRow, _RowById))
    return _Decoders(row.decode, row.decode_lines, by_id.decode_lines)


def _with(needed: str | None, kind: type[msgspec.Struct]) -> Any:
    if needed is None:
        return kind
    field = ("needed", str | bool | int | float | list[Any] | dict[str, Any])
    return msgspec.defstruct(
        kind.__name__, [field], bases=(kind,), kw_only=True, gc=False, rename={"needed": needed}
    )


_LACKS = "it has no"
_MALFORMED = (msgspec.MsgspecError, orjson.JSONDecodeError, RecursionError)


class Part(NamedTuple):
    """What a pass over a part of the file found; lines and rows count from the part's first."""

    places: list[tuple[int, int]]
    hashes: array[int]
    problems: list[tuple[int, str]]
    foreign: set[str]
    lines: int


def check_input(file: Path, limit: int | None, agents: Agents) -> Checked:
    """By all cores where it is large; only so many rows of it, if there is a limit."""
    pieces: list[tuple[int, int | None]] = [(0, None)]
    if limit is None:
        pieces = [*line_parts(file, _PART_BYTES)]
    copies = None if is_alone() else 0
    work = SharedWork(
        lambda number: check_part(file, *pieces[number], limit, agents), len(pieces), copies=copies
    )
    parts = work.result()
    found = Checked([], set(), [], b"", has_repeats=False)
    lines, rows = 1, 0
    for part in parts:
        found.problems.extend((lines + line, text) for line, text in part.problems)
        found.foreign_agents.update(part.foreign)
        found.places.extend((rows + row, start) for row, start in part.places)
        lines, rows = lines + part.lines, rows + len(part.hashes)
    _show_a_good_row(found.problems)
    hashes = np.concatenate([np.asarray(part.hashes, dtype=np.int64) for part in parts])
    in_order = np.sort(hashes)
    return found._replace(hashes=hashes.tobytes(), has_repeats=bool(np.any(in_order[1:] == in_order[:-1])))


def check_part(
    path: Path,
    start: int = 0,
    end: int | None = None,
    limit: int | None = None,
    agents: Agents = Agents(),  # noqa: B008
) -> Part:
    found = Part([], array("q"), [], set(), 0)
    decoders = _decoders(agents.needs)
    lines = 0
    for block in line_blocks(path, start=start, end=end):
        found.places.append((len(found.hashes), block.offset))
        if not _take_block(found, block, agents, decoders):
            _take_lines(found, path, block, lines, limit, agents, decoders.one)
        lines += len(block.ends)
        if limit is not None and len(found.hashes) >= limit:
            del found.hashes[limit:]
            break
    return found._replace(lines=lines)


def _take_block(found: Part, block: LineBlock, agents: Agents, decoders: _Decoders) -> bool:
    """The usual case, a block of good rows, without a loop over lines; False when it is not."""
    hashes: Iterable[int]
    if (named := decode_block(block, decoders.lines_by_id)) is not None:
        hashes = map(hash, [row.id for row in named])
    elif (others := decode_block(block, decoders.lines)) is not None:
        named_agents = {agent for row in others if (agent := row.agent)} - {agents.asked}
        if named_agents & agents.others:
            return False
        found.foreign.update(named_agents)
        lines = block.data.tobytes().split(b"\n")
        hashes = [hash(task_id(row, line)) for row, line in zip(others, lines, strict=False)]
    else:
        return False
    found.hashes.frombytes(np.fromiter(hashes, dtype=np.int64, count=len(block.ends)).tobytes())
    return True


def _take_lines(
    found: Part,
    path: Path,
    block: LineBlock,
    before: int,
    limit: int | None,
    agents: Agents,
    decode: Callable[[bytes], InputRow],
) -> None:
    """The same for a block with something odd in it: blank lines, bad rows."""
    from rollbook.records.jsonl import read_lines  # with all that writing takes: the usual input does without

    end = block.offset + len(block.data)
    for line in read_lines(path, start=block.offset, end=end, number=before, accept_tail=True):
        if not line.data or line.data.isspace():
            continue
        if limit is not None and len(found.hashes) >= limit:
            return
        try:
            orjson.loads(line.data)
            row = decode(line.data)
        except _MALFORMED as error:
            found.problems.append((line.number, _problem(path, line, error)))
            continue
        if row.agent in agents.others:
            apart = f"collect such rows apart, with agent_name={row.agent}"
            found.problems.append((line.number, f"its agent_ref names {row.agent!r}; {apart}"))
            continue
        if row.agent not in (None, agents.asked):
            found.foreign.add(str(row.agent))
        found.hashes.append(hash(task_id(row, line.data)))


def _show_a_good_row(problems: list[tuple[int, str]]) -> None:
    """Once, with the first row that lacks something: the others lack it as well, as a rule."""
    for place, (line, text) in enumerate(problems):
        if text.startswith(_LACKS):
            problems[place] = (line, f"{text}; a good row is like this: {A_GOOD_ROW}")
            return


def _problem(path: Path, line: Line, error: Exception) -> str:
    if line.data.startswith(codecs.BOM_UTF8):
        remove = rf"sed -i '1s/^\xEF\xBB\xBF//' {path}"
        return f"begins with a byte order mark; remove it: {remove}"
    text = str(error).replace("`$.", "`").replace("Object missing", _LACKS)
    return f"{text[:1].lower()}{text[1:]}"
