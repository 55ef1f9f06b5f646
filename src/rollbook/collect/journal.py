"""What is already done, known within seconds for a million rows.

The output file is the only truth: a row counts as done when its complete line is there. The journal beside
it is a shortcut, 32 bytes a line (row, repeat, where the line ends, reward, tokens), appended after the lines
are on the disk; it may be deleted at any time. On resume the journal is believed up to its last entry that
fits the file and bears its row's key there, and the lines behind it are found by their prefixes alone,
without parsing a row.
"""

from __future__ import annotations

import os
import re
from array import array
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import orjson

from rollbook.collect.plan import Flags, Plan
from rollbook.errors import BadLineError, WriteError
from rollbook.records.jsonl import Line, check_line, read_blocks, read_lines
from rollbook.records.rollout_stats import RunningMean
from rollbook.records.row_keys import KEY, ROLLOUT_INDEX, TASK_INDEX, key_of

_ENTRY = np.dtype(
    [
        ("row", "<u4"),
        ("repeat", "<u4"),
        ("end", "<u8"),
        ("reward", "<f8"),  # NaN where there is none
        ("input_tokens", "<u4"),
        ("output_tokens", "<u4"),
    ]
)
_NOTHING = np.empty(0, dtype=_ENTRY)
_NO_ROW = 0xFFFFFFFF  # a line that the plan of its time did not know; a later one may
_OPENING = b'{"' + KEY.encode() + b'":"'
_PREFIX = re.compile(
    rb'\{"%b":("(?:[^"\\]|\\.)*")(?:,"%b":[^,]*,"%b":\d+,"reward":(-?[0-9][0-9.eE+-]*),)?'
    % (KEY.encode(), TASK_INDEX.encode(), ROLLOUT_INDEX.encode())
)
_USAGE_OPENING = b'"usage":{"input_tokens":'
_USAGE = re.compile(rb'"usage":\{"input_tokens":(\d+),(?:"[a-z_]+":\{[^{}]*\},)?"output_tokens":(\d+)')
_SCAN_BLOCK = 8 << 20

Entries = np.ndarray[Any, np.dtype[Any]]


class Entry(NamedTuple):
    """A line that is on the disk."""

    row: int
    repeat: int
    end: int
    reward: float
    input_tokens: int
    output_tokens: int


class Totals(NamedTuple):
    """What the lines of a file come to."""

    reward: RunningMean
    input_tokens: int = 0
    output_tokens: int = 0


class Journal:
    """The writer: entries become visible to a later resume once their lines are durable."""

    def __init__(self, path: Path, entries: Entries) -> None:
        """Start over with what a scan found; a journal is never patched."""
        try:
            path.write_bytes(entries.tobytes())
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except OSError as error:
            raise WriteError(f"{path}: cannot be written: {error.strerror or error}") from error
        self._is_whole = True

    def append(self, entries: list[Entry]) -> None:
        """A full disk ends the journal for this session: it may be short, but never have a gap."""
        data = np.array(entries, dtype=_ENTRY).tobytes()
        if self._is_whole:
            try:
                self._is_whole = os.write(self._descriptor, data) == len(data)
            except OSError:
                self._is_whole = False

    def close(self) -> None:
        os.close(self._descriptor)


class Done:
    """The finished (row, repeat) pairs of an output file, and everything that is odd about it."""

    def __init__(self, flags: Flags, entries: Entries, unknown: int) -> None:
        self.flags = flags
        self.entries = entries
        self.unknown = unknown  # lines whose task or repeat the plan does not have

    @property
    def count(self) -> int:
        return int(np.count_nonzero(self.flags))

    def totals(self) -> Totals:
        """Of the lines that are planned."""
        rows, repeats = self.flags.shape
        planned = self.entries[(self.entries["row"] < rows) & (self.entries["repeat"] < repeats)]
        rewards = planned["reward"][np.isfinite(planned["reward"])]
        reward = (
            RunningMean(len(rewards), float(rewards.mean()), float(rewards.std())) if len(rewards) else None
        )
        tokens = (int(planned[name].sum(dtype=np.int64)) for name in ("input_tokens", "output_tokens"))
        return Totals(reward or RunningMean(), *tokens)


def find_done(output: Path, journal: Path, plan: Plan, *, same_input: bool) -> Done:
    """Which items of the plan have their line in the output.

    With another input than the one the journal was written for, its row numbers mean nothing, and every
    line is looked up by its key. A key that stands on two lines is an error that names both.
    """
    flags: Flags = np.zeros((plan.rows, plan.repeats), dtype=np.bool_)
    if not output.exists():
        return Done(flags, _NOTHING, 0)
    known = _believable(journal, output, plan) if same_input else _NOTHING
    entries = np.concatenate([known, _scan(output, int(known["end"][-1]) if len(known) else 0, plan)])
    planned = (entries["row"] < plan.rows) & (entries["repeat"] < plan.repeats)
    inside = entries[planned]
    places = inside["row"].astype(np.int64) * plan.repeats + inside["repeat"]
    _refuse_duplicates(output, places, inside)
    flags.reshape(-1)[places] = True
    return Done(flags, entries, int(np.count_nonzero(~planned)))


def _believable(journal: Path, output: Path, plan: Plan) -> Entries:
    """The entries that fit the output: whole, in order, the last one a line with the key of its row.

    One entry a line, so a line that was taken out or put in anywhere before it would show there.
    """
    try:
        data = journal.read_bytes()
    except FileNotFoundError:
        return _NOTHING
    entries = np.frombuffer(data[: len(data) - len(data) % _ENTRY.itemsize], dtype=_ENTRY)
    ends = entries["end"]
    if len(ends) and (ends[0] == 0 or np.any(ends[1:] <= ends[:-1])):
        return _NOTHING
    entries = entries[: int(np.searchsorted(ends, output.stat().st_size, side="right"))]
    strange = np.flatnonzero(entries["row"] == _NO_ROW)  # this plan may know them: read again from there
    entries = entries[: strange[0]] if len(strange) else entries
    # Rows past the plan's end are as good as any, but cannot be checked.
    checkable = np.flatnonzero(entries["row"] < plan.rows)
    if not len(checkable):
        return _NOTHING
    last = int(checkable[-1])
    start, end = int(entries["end"][last - 1]) if last else 0, int(entries["end"][last])
    with output.open("rb") as file:
        file.seek(start)
        line = file.read(end - start)
    key = key_of(plan.id_of(int(entries["row"][last])), int(entries["repeat"][last]))
    opening = orjson.dumps({KEY: key})[:-1]
    fits = line.startswith(opening) and line.find(b"\n") == len(line) - 1
    return entries[: last + 1] if fits else _NOTHING


def _scan(output: Path, start: int, plan: Plan) -> Entries:
    """The lines from `start` on, by their keys."""
    hashes, repeats, ends = array("q"), array("q"), array("q")
    rewards, tokens = array("d"), array("q")
    for offset, block in read_blocks(output, start=start, size=_SCAN_BLOCK):
        position, before = 0, len(ends)
        while (newline := block.find(b"\n", position)) >= 0:
            match = _PREFIX.match(block, position, newline)
            key = _parted(match[1]) if match else None
            if match is None or key is None or block[newline - 1] != ord("}"):
                _refuse_line(output, offset + position, block[position:newline])
            name, repeat = key
            hashes.append(hash(name))
            repeats.append(repeat)
            ends.append(offset + newline + 1)
            rewards.append(float(match[2] or "nan"))
            tokens.extend(_tokens(block, match.end(), newline))
            position = newline + 1
        # A record inside another is rare and legal, two glued together are not: only parsing can tell.
        if block.count(_OPENING, 0, position) != len(ends) - before:
            for line in read_lines(output, start=offset, end=offset + position):
                _check_line(output, line.start, line.data)
    entries = np.empty(len(ends), dtype=_ENTRY)
    rows, of_rows = plan.find(np.asarray(hashes, dtype=np.int64)), np.asarray(repeats, dtype=np.int64)
    is_known = (rows >= 0) & (of_rows >= 0)
    entries["row"] = np.where(is_known, rows, _NO_ROW)
    entries["repeat"] = np.where(is_known, of_rows, 0)
    entries["end"] = ends
    entries["reward"] = rewards
    entries["input_tokens"], entries["output_tokens"] = np.asarray(tokens, dtype=np.int64).reshape(-1, 2).T
    return entries


def _tokens(block: bytes, start: int, end: int) -> tuple[int, int]:
    """The tokens a line says it took; 0 where it does not."""
    place = block.rfind(_USAGE_OPENING, start, end)
    match = _USAGE.match(block, place, end) if place >= 0 else None
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _parted(key: bytes) -> tuple[str, int] | None:
    """The task's id and the repeat of a key as it stands in the file; -1 where no repeat stands."""
    try:
        text: str = orjson.loads(key) if b"\\" in key else key[1:-1].decode()
    except ValueError:
        return None
    name, _, repeat = text.rpartition("#")
    return name, int(repeat) if repeat.isdecimal() and len(repeat) < 10 else -1


def _check_line(output: Path, offset: int, data: bytes) -> None:
    try:
        orjson.loads(data)
    except orjson.JSONDecodeError:
        check_line(output, Line(data, _line_at(output, offset), offset, offset + len(data)))


def _refuse_line(output: Path, offset: int, data: bytes) -> NoReturn:
    _check_line(output, offset, data)
    raise BadLineError(
        output,
        _line_at(output, offset),
        f"does not begin with {KEY!r}: not a line of this collection. Choose another output",
    )


def _refuse_duplicates(output: Path, places: np.ndarray[Any, np.dtype[np.int64]], entries: Entries) -> None:
    order = np.argsort(places, kind="stable")
    same = np.flatnonzero(places[order][1:] == places[order][:-1])
    if len(same):
        first, second = (int(entries["end"][order[same[0] + step]]) - 1 for step in (0, 1))
        raise BadLineError(
            output,
            _line_at(output, second),
            f"the same key stands on line {_line_at(output, first)} already; remove one of the two",
        )


def _line_at(path: Path, offset: int) -> int:
    """The number of the line that holds a byte; only errors pay for counting."""
    number = 1
    for start, block in read_blocks(path):
        if start + len(block) > offset:
            return number + block.count(b"\n", 0, offset - start)
        number += block.count(b"\n")
    return number
