"""The journal: a shortcut to what is done, 32 bytes for each line of the output.

Row, repeat, where the line ends, reward and tokens, appended after the lines are on the disk; it may be
deleted at any time. `done.py` reads it. Writing it needs no numpy, which takes a while to load.
"""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rollbook.errors import WriteError

if TYPE_CHECKING:
    import numpy as np

    Entries = np.ndarray[Any, np.dtype[Any]]  # of ENTRY_FIELDS
    Flags = np.ndarray[Any, np.dtype[np.bool_]]  # (rows, repeats)

# As `struct` and numpy both call them, lowest byte first.
ENTRY_FIELDS = {
    "row": "I",
    "repeat": "I",
    "end": "Q",
    "reward": "d",
    "input_tokens": "I",
    "output_tokens": "I",
}
# On the output tokens of a line whose tokens are not, or not all, known.
WITHOUT_USAGE = 1 << 31
_pack = struct.Struct(f"<{''.join(ENTRY_FIELDS.values())}").pack


class Entry(NamedTuple):
    """A line that is on the disk."""

    row: int
    repeat: int
    end: int
    reward: float  # NaN where there is none
    input_tokens: int
    output_tokens: int  # with the mark WITHOUT_USAGE or not


class RunningMean:
    """Mean and spread of a stream (Welford)."""

    def __init__(self, count: int = 0, mean: float = 0.0, std: float = 0.0) -> None:
        """A stream may go on where another one, of which this much is known, has ended."""
        self.count = count
        self.mean = mean
        self._squares = std * std * count

    def add(self, value: float) -> None:
        self.count += 1
        delta = value - self.mean
        self.mean += delta / self.count
        self._squares += delta * (value - self.mean)

    @property
    def std(self) -> float:
        return math.sqrt(self._squares / self.count) if self.count else 0.0


class Totals(NamedTuple):
    """What the lines of a file come to."""

    reward: RunningMean
    input_tokens: int = 0
    output_tokens: int = 0
    without_usage: int = 0  # lines


class Journal:
    """The writer: entries become visible to a later resume once their lines are durable."""

    def __init__(self, path: Path, entries: Entries | None) -> None:
        """Start over with what a scan found; a journal is never patched."""
        try:
            path.write_bytes(b"" if entries is None else entries.tobytes())
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except OSError as error:
            raise WriteError(f"{path}: cannot be written: {error.strerror or error}") from error
        self._is_whole = True

    def append(self, entries: list[Entry]) -> None:
        """A full disk ends the journal for this session: it may be short, but never have a gap."""
        data = b"".join([_pack(*entry) for entry in entries])
        if self._is_whole:
            try:
                self._is_whole = os.write(self._descriptor, data) == len(data)
            except OSError:
                self._is_whole = False

    def close(self) -> None:
        os.close(self._descriptor)


class Done:
    """The finished (row, repeat) pairs of an output file, and everything that is odd about it."""

    def __init__(self, flags: Flags | None = None, entries: Entries | None = None, unknown: int = 0) -> None:
        """Without flags and entries: nothing is done."""
        self.flags = flags
        self.entries = entries
        self.unknown = unknown  # lines whose task or repeat the plan does not have

    @property
    def count(self) -> int:
        return 0 if self.flags is None else int(self.flags.sum())

    def totals(self) -> Totals:
        """Of the lines that are planned."""
        if self.flags is None or self.entries is None:
            return Totals(RunningMean())
        rows, repeats = self.flags.shape
        planned = self.entries[(self.entries["row"] < rows) & (self.entries["repeat"] < repeats)]
        rewards = planned["reward"][abs(planned["reward"]) < math.inf]
        reward = (
            RunningMean(len(rewards), float(rewards.mean()), float(rewards.std())) if len(rewards) else None
        )
        seen, marked = planned["input_tokens"], planned["output_tokens"]
        said = marked & (WITHOUT_USAGE - 1)
        # A line that was read again has no mark, but nothing counted either.
        without_usage = (marked >= WITHOUT_USAGE) | ((seen == 0) & (said == 0))
        tokens = (int(column.sum(dtype="int64")) for column in (seen, said, without_usage))
        return Totals(reward or RunningMean(), *tokens)
