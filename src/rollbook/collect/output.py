"""The output of a collection, which alone says what is done: one scan of its lines, and their order.

A rollout is done when its complete line is there. A blank line is none: its bytes count as the beginning of
the line behind it.
"""

from __future__ import annotations

import io
import math
import os
import shlex
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np
import orjson
import xxhash

from rollbook.collect.input import Flags, Input, Places, hash_of
from rollbook.collect.progress import Totals
from rollbook.errors import BadFileError, BadLineError, WriteError
from rollbook.records.atomic import replacing
from rollbook.records.complete import FileFacts
from rollbook.records.identity import DIGEST, KEY, split_key
from rollbook.records.jsonl import Line, check_line, read_blocks
from rollbook.rollouts.usage import clamp_tokens

_BUFFER = 1 << 20
_BEGIN = f'{{"{KEY}":"'.encode()


class _Usage(msgspec.Struct, gc=False):
    input_tokens: int = 0
    output_tokens: int = 0


class _Response(msgspec.Struct, gc=False):
    usage: _Usage | None = None


class _Row(msgspec.Struct, gc=False):
    key: str = msgspec.field(name=KEY)
    reward: float | None = None
    response: _Response | None = None
    digest: str | None = msgspec.field(default=None, name=DIGEST)


_NO_USAGE = _Usage()
_decode = msgspec.json.Decoder(_Row).decode


class Lines:
    """What the lines of an output say of themselves, column by column."""

    def __init__(self) -> None:
        self.tasks, self.repeats = array("Q"), array("q")  # hash of the id; -1 where a key names no repeat
        self.ends = array("q")
        self.rewards = array("d")  # NaN where there is none
        self.input_tokens, self.output_tokens = array("q"), array("q")
        self.have_digests = True
        self.facts: FileFacts | None = None

    def add(self, row: _Row, end: int) -> None:
        task, repeat = split_key(row.key)
        usage = (row.response and row.response.usage) or _NO_USAGE
        self.tasks.append(hash_of(task))
        self.repeats.append(-1 if repeat is None else repeat)
        self.ends.append(end)
        self.rewards.append(math.nan if row.reward is None else row.reward)
        self.input_tokens.append(clamp_tokens(usage.input_tokens))
        self.output_tokens.append(clamp_tokens(usage.output_tokens))
        self.have_digests &= row.digest is not None


class _DigestedFile(io.FileIO):
    """A file whose bytes are digested block by block on their way to whoever reads it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._digest, self._size = xxhash.xxh3_128(), 0

    def readinto(self, buffer: Any) -> int | None:
        count = super().readinto(buffer)
        if count:
            self._digest.update(memoryview(buffer)[:count])
            self._size += count
        return count

    @property
    def facts(self) -> FileFacts:
        return FileFacts(self._size, self._digest.hexdigest())


_NONE: Places = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class Found:
    """Which rollouts of an input have their line in an output, and what its bytes are."""

    flags: Flags | None = None  # None: nothing is done
    places: Places = field(default_factory=_NONE.copy)  # of each line: row * repeats + repeat, or -1
    ends: Places = field(default_factory=_NONE.copy)
    totals: Totals = field(default_factory=Totals)
    facts: FileFacts | None = None  # of the whole file, as it was read

    @property
    def count(self) -> int:
        return 0 if self.flags is None else int(self.flags.sum())

    @property
    def unknown(self) -> int:
        """Lines whose task or repeat is not planned."""
        return int((self.places < 0).sum())


def find_done(output: Path, rows: Input, repeats: int) -> Found:
    """Reads the whole output; a key that is on two lines is an error that names both."""
    lines = scan(output)
    # An output that was begun before 0.2 goes on without digests: they could be of something else than what
    # its lines show.
    rows.with_digests = lines.have_digests
    found_rows, found_repeats = rows.find(np.asarray(lines.tasks)), np.asarray(lines.repeats)
    is_planned = (found_rows >= 0) & (found_repeats >= 0) & (found_repeats < repeats)
    places = np.where(is_planned, found_rows * repeats + found_repeats, -1)
    ends = np.asarray(lines.ends, dtype=np.int64)
    _refuse_duplicates(output, places, ends)
    flags: Flags = np.zeros((rows.rows, repeats), dtype=np.bool_)
    flags.reshape(-1)[places[is_planned]] = True
    return Found(flags, places, ends, _totals(lines, is_planned), lines.facts)


def scan(output: Path) -> Lines:
    """The complete lines; one that cannot be a line of a collection is refused by its number."""
    found, end = Lines(), 0
    with io.BufferedReader(digested := _DigestedFile(output), _BUFFER) as file:
        for line in file:
            start, end = end, end + len(line)
            if not line.endswith(b"\n"):
                break  # a write that was under way
            try:
                row = _decode(line) if line.startswith(_BEGIN) else None
            except (msgspec.MsgspecError, UnicodeDecodeError):
                row = None
            if row is None:
                if line.isspace():
                    continue
                row = _odd_row(output, Line(line[:-1], 0, start, end))
            found.add(row, end)
    found.facts = digested.facts
    return found


def verify(output: Path, rows: Input, repeats: int) -> Found:
    """Read the finished file and compare it with what was planned."""
    found = find_done(output, rows, repeats)
    missing = rows.rows * repeats - found.count
    if missing:
        raise BadFileError(
            output,
            f"{missing} of {rows.rows * repeats} rollouts are missing from the finished file; "
            "rerun the same command to collect them",
        )
    return found


def put_in_order(output: Path, found: Found) -> bool:
    """Sort the lines by (row, repeat), those that are not planned at the end; returns whether any was moved.

    They are copied into a new file that takes the place of the old one whole: a kill in the middle leaves the
    old one, and the output is never held in memory. Whoever calls holds the lock.
    """
    order = np.argsort(np.where(found.places < 0, np.iinfo(np.int64).max, found.places), kind="stable")
    if np.array_equal(order, np.arange(len(order))):
        return False
    starts = np.concatenate([[0], found.ends[:-1]])
    try:
        with output.open("rb") as source, replacing(output, is_locked=True, follow_links=True) as target:
            for start, end in zip(starts[order].tolist(), found.ends[order].tolist(), strict=True):
                target.write(os.pread(source.fileno(), end - start, start))
    except (OSError, WriteError) as error:
        raise WriteError(f"the lines could not be put in order: {error}") from error
    return True


def _totals(lines: Lines, is_planned: Flags) -> Totals:
    rewards = np.asarray(lines.rewards)[is_planned]
    rewards = rewards[np.isfinite(rewards)]
    columns = (lines.input_tokens, lines.output_tokens)
    input_tokens, output_tokens = (np.asarray(column)[is_planned] for column in columns)
    sums = float(rewards.sum()), float((rewards * rewards).sum())
    uncounted = int(((input_tokens == 0) & (output_tokens == 0)).sum())
    return Totals(len(rewards), *sums, int(input_tokens.sum()), int(output_tokens.sum()), uncounted)


def _odd_row(output: Path, line: Line) -> _Row:
    """A line of ours with something odd in it, such as a reward that is text."""
    try:
        row = orjson.loads(line.data)
    except orjson.JSONDecodeError:
        row = None
    if not isinstance(row, dict) or next(iter(row), None) != KEY or not isinstance(row[KEY], str):
        _refuse(output, line)
    reward = row.get("reward")
    try:
        response = msgspec.convert(row.get("response"), _Response)
    except msgspec.ValidationError:  # an agent of another make may count otherwise, or not at all
        response = None
    digest = row[DIGEST] if isinstance(row.get(DIGEST), str) else None
    return _Row(row[KEY], float(reward) if isinstance(reward, int | float) else None, response, digest)


def _refuse(output: Path, line: Line) -> NoReturn:
    number = _line_at(output, line.start)
    why = f"does not begin with {KEY!r}: not a line of this collection"
    try:
        check_line(output, line._replace(number=number))
    except BadLineError as error:
        why = error.why
    raise BadLineError(
        output, number, f"{why}; to set it aside, type {_set_aside(output, number)} and then the same command"
    )


def _refuse_duplicates(output: Path, places: Places, ends: Places) -> None:
    order = np.argsort(places, kind="stable")
    same = np.flatnonzero((places[order][1:] == places[order][:-1]) & (places[order][1:] >= 0))
    if len(same):
        first, second = (_line_at(output, int(ends[order[same[0] + step]]) - 1) for step in (0, 1))
        raise BadLineError(
            output,
            second,
            f"line {first} has the same key; to set line {second} aside, type "
            f"{_set_aside(output, second)} and then the same command",
        )


def _set_aside(output: Path, number: int) -> str:
    """The command that does; of the file itself, for sed puts a new file in the place of a link."""
    file = output.resolve()
    there, aside = shlex.quote(str(file)), shlex.quote(f"{file}.aside")
    return f"sed -n '{number}p' {there} >> {aside} && sed -i '{number}d' {there}"


def _line_at(path: Path, offset: int) -> int:
    """The number of the line that holds a byte; only errors pay for counting."""
    number = 1
    for start, block in read_blocks(path):
        if start + len(block) > offset:
            return number + block.count(b"\n", 0, offset - start)
        number += block.count(b"\n")
    return number
