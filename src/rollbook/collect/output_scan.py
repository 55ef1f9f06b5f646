"""What the lines of an output say of themselves: key, reward, tokens, and where each ends.

Lines as a collector writes them are decoded by the block, in a large file by all cores. A block with
something odd in it is read line by line, and what cannot be a line of a collection is refused by its number.
A blank line is none: its bytes count as the beginning of the line behind it.
"""

from __future__ import annotations

import math
import shlex
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import orjson

from rollbook.errors import BadLineError
from rollbook.forked import SharedWork, is_alone
from rollbook.records.jsonl import Line, check_line, read_blocks, read_lines
from rollbook.records.row_blocks import decode_block, line_blocks, line_parts
from rollbook.records.row_keys import KEY
from rollbook.rollouts.usage import clamp_tokens

_PART_BYTES = 32 << 20
_LONGEST_REPEAT = 9  # digits; more do not fit the journal


class _Usage(msgspec.Struct, gc=False):
    input_tokens: int = 0
    output_tokens: int = 0


class _Response(msgspec.Struct, gc=False):
    usage: _Usage | None = None


class _Row(msgspec.Struct, gc=False):
    key: str = msgspec.field(name=KEY)
    reward: float | None = None
    response: _Response | None = None


_NO_USAGE = _Usage()
_decode_lines = msgspec.json.Decoder(_Row).decode_lines


class Scanned:
    """Column by column: hashes of task ids, good within this process, -1 where a key names no repeat."""

    def __init__(self) -> None:
        self.tasks, self.repeats, self.ends = array("q"), array("i"), array("q")
        self.rewards = array("d")  # NaN where there is none
        self.input_tokens, self.output_tokens = array("q"), array("q")

    def add(self, rows: Sequence[_Row]) -> None:
        """By comprehensions, column after column: a million calls of a function take half as long again."""
        parted = [row.key.rpartition("#") for row in rows]
        usages = [(row.response and row.response.usage) or _NO_USAGE for row in rows]
        self.tasks.extend([hash(name) for name, _, _ in parted])
        self.repeats.extend(
            [int(text) if text.isdecimal() and len(text) <= _LONGEST_REPEAT else -1 for _, _, text in parted]
        )
        self.rewards.extend([math.nan if row.reward is None else row.reward for row in rows])
        self.input_tokens.extend(_believable([usage.input_tokens for usage in usages]))
        self.output_tokens.extend(_believable([usage.output_tokens for usage in usages]))

    def extend(self, other: Scanned) -> None:
        for name, column in vars(other).items():
            getattr(self, name).extend(column)


def _believable(tokens: list[int]) -> list[int]:
    ends = [min(tokens, default=0), max(tokens, default=0)]
    return (
        tokens if ends == [clamp_tokens(end) for end in ends] else [clamp_tokens(count) for count in tokens]
    )


def scan(output: Path, start: int) -> Scanned:
    """The complete lines from an offset on."""
    parts = line_parts(output, _PART_BYTES, start=start)
    copies = None if is_alone() else 0  # an environment may have begun threads
    work = SharedWork(lambda number: _scan_part(output, *parts[number]), len(parts), copies=copies)
    found = Scanned()
    for part in work.result():
        found.extend(part)
    return found


def _scan_part(output: Path, start: int, end: int) -> Scanned:
    found = Scanned()
    for block in line_blocks(output, start=start, end=end):
        rows = decode_block(block, _decode_lines) if block.has_last_newline else None
        if rows is None:
            _take_lines(found, output, block.offset, len(block.data))
            continue
        found.add(rows)
        found.ends.frombytes((block.ends + (block.offset + 1)).tobytes())
    return found


def _take_lines(found: Scanned, output: Path, start: int, length: int) -> None:
    for line in read_lines(output, start=start, end=start + length):
        if not line.data.strip():
            continue
        try:
            row = orjson.loads(line.data)
        except orjson.JSONDecodeError:
            row = None
        if not isinstance(row, dict) or next(iter(row), None) != KEY or not isinstance(row[KEY], str):
            _refuse(output, line)
        found.add([_Row(row[KEY], _number(row.get("reward")), _response_of(row))])
        found.ends.append(line.end)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _response_of(row: dict[str, Any]) -> _Response | None:
    try:
        return msgspec.convert(row.get("response"), _Response)
    except msgspec.ValidationError:  # an agent of another make may count otherwise, or not at all
        return None


def _refuse(output: Path, line: Line) -> NoReturn:
    number = line_at(output, line.start)
    why = f"does not begin with {KEY!r}: not a line of this collection"
    try:
        check_line(output, line._replace(number=number))
    except BadLineError as error:
        why = error.why
    raise BadLineError(
        output,
        number,
        f"{why}; to put it aside, type {put_aside(output, number)} and then the same command again, which "
        "collects what is missing",
    )


def put_aside(output: Path, number: int) -> str:
    """The command that does; of the file itself, for sed puts a new file in the place of a link."""
    file = output.resolve()
    there, aside = shlex.quote(str(file)), shlex.quote(f"{file}.aside")
    return f"sed -n '{number}p' {there} >> {aside} && sed -i '{number}d' {there}"


def line_at(path: Path, offset: int) -> int:
    """The number of the line that holds a byte; only errors pay for counting."""
    number = 1
    for start, block in read_blocks(path):
        if start + len(block) > offset:
            return number + block.count(b"\n", 0, offset - start)
        number += block.count(b"\n")
    return number
