"""One pass over a file of JSON lines: its rows by the block, and the size and digest of what was read.

Rows are decoded into structs of the fields that an audit needs; everything else is skipped over. A line that
is none is a finding with its number, and the audit goes on behind it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import xxhash

from rollbook.audit.auditor import Auditor
from rollbook.audit.result import Kind
from rollbook.errors import BadLineError
from rollbook.records.complete import FileFacts, file_facts
from rollbook.records.jsonl import Line, check_line
from rollbook.records.record import decode_line
from rollbook.records.row_blocks import Ints, LineBlock, decode_block, line_blocks

T = TypeVar("T")

_BLOCK = 1 << 18  # bytes that are decoded together: what is made of them should stay in the cache


class Rows(NamedTuple, Generic[T]):
    """Some rows of a file, and for each the number of its line and the offsets of its ends."""

    numbers: Sequence[int]
    starts: Sequence[int] | Ints
    ends: Sequence[int] | Ints  # behind the newline
    rows: list[T]


class Scan(Generic[T]):
    def __init__(
        self,
        auditor: Auditor,
        path: Path,
        kind: type[T],
        *,
        end: int | None = None,
        is_open: bool = False,
        is_first_of_two: bool = False,
    ) -> None:
        """`is_open`: somebody may be writing the last line, so that it need not be whole. `is_first_of_two`:
        what cannot be read is told by the second scan."""
        self._auditor, self._path, self._kind = auditor, path, kind
        self._end, self._is_open, self._is_quiet = end, is_open, is_first_of_two
        self.facts = FileFacts(0, "")  # of all that was read, once it was

    def __iter__(self) -> Iterator[Rows[T]]:
        digest, size, number = xxhash.xxh3_128(), 0, 1
        decode_lines = decoder_of(self._kind).decode_lines
        for block in line_blocks(self._path, end=self._end, size=_BLOCK):
            digest.update(block.data.data)
            size += len(block.data)
            self._auditor.read(len(block.data))
            if not block.has_last_newline:
                self._refuse_tail(number)
                break
            count = len(block.ends)
            rows = decode_block(block, decode_lines)
            if rows is not None:
                starts, ends = block.starts + block.offset, block.ends + (block.offset + 1)
                yield Rows(range(number, number + count), starts, ends, rows)
            else:
                yield self._line_by_line(block, number)
            number += count
        self.facts = FileFacts(size, digest.hexdigest())

    def _line_by_line(self, block: LineBlock, first: int) -> Rows[T]:
        numbers: list[int] = []
        starts: list[int] = []
        ends: list[int] = []
        rows: list[T] = []
        for number, (start, end) in enumerate(zip(block.starts, block.ends, strict=True), first):
            line = Line(block.data[start:end].tobytes(), number, int(start), int(end))
            try:
                rows.append(_decoded(self._path, line, self._kind))
                numbers.append(number)
                starts.append(block.offset + int(start))
                ends.append(block.offset + int(end) + 1)
            except BadLineError as error:
                self._refuse(number, error.why)
        return Rows(numbers, starts, ends, rows)

    def _refuse_tail(self, number: int) -> None:
        if not self._is_open:
            self._refuse(number, "the line is cut off: the file does not end with a newline")

    def _refuse(self, number: int, why: str) -> None:
        if self._is_quiet:
            return
        self._auditor.find(
            Kind.UNREADABLE,
            why,
            file=self._path,
            line=number,
            next=f"sed -n {number}p {shlex.quote(str(self._path))} shows it; restore the file from a copy",
        )


def _decoded(path: Path, line: Line, kind: type[T]) -> T:
    try:
        row: T = decoder_of(kind).decode(line.data)
        return row
    except (msgspec.MsgspecError, UnicodeDecodeError):
        pass
    try:
        return msgspec.convert(decode_line(path, line), kind)  # which takes a bare NaN of another writer
    except msgspec.ValidationError as error:
        raise BadLineError(path, line.number, f"not what this file holds: {error}") from None
    except BadLineError:
        check_line(path, line)  # raises, and says it better
        raise


def decoder_of(kind: Any) -> msgspec.json.Decoder[Any]:
    """Made once for every kind of row."""
    if kind not in _decoders:
        _decoders[kind] = msgspec.json.Decoder(kind)
    return _decoders[kind]


_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


def file_digest(auditor: Auditor, path: Path) -> FileFacts:
    """Size and digest of a file that holds no lines of ours."""
    facts = file_facts(path)
    auditor.read(facts.bytes)
    return facts


def size_of(path: Path) -> int:
    """0 where it is not there."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
