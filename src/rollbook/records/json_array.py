"""A file that is one JSON array, `[{...}, ...]`: its elements, as rows are read from lines.

The whole file is read at once, so a large one is refused, with the command that makes lines of it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from rollbook.errors import BadFileError, UsageError

MOST_BYTES = 256 << 20
_FIRST_LINE = 1 << 16
_decode = msgspec.json.Decoder(list[msgspec.Raw]).decode


class Element(NamedTuple):
    number: int  # from 1
    start: int  # where it is in the file, and where it ends
    end: int
    line: bytes  # the element without line breaks


def is_array(path: Path) -> bool:
    """Whether a file is one array: it begins with a bracket, but not with a line that is one itself."""
    with path.open("rb") as file:
        first = next((line for line in iter(lambda: file.readline(_FIRST_LINE), b"") if line.strip()), b"")
        if not first.lstrip().startswith(b"["):
            return False
        try:
            msgspec.json.decode(first)
        except (msgspec.DecodeError, RecursionError):
            return True
        return all(not chunk.strip() for chunk in iter(lambda: file.read(_FIRST_LINE), b""))


def elements(path: Path) -> Iterator[Element]:
    """The elements in order. What they are is for the caller to check."""
    if (size := path.stat().st_size) > MOST_BYTES:
        lines = shlex.quote(str(path.with_suffix(".jsonl")))
        raise UsageError(
            f"{path} is one JSON array of {size:,} bytes, and above {MOST_BYTES >> 20} MiB none is read; "
            f"make lines of it: jq -c '.[]' {shlex.quote(str(path))} > {lines}"
        )
    data = path.read_bytes()
    try:
        found = _decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadFileError(path, f"is not a JSON array ({error})") from None
    place = 0
    for number, raw in enumerate(found, 1):
        element = bytes(raw)
        start = data.index(element, place)
        place = start + len(element)
        yield Element(number, start, place, msgspec.json.format(element, indent=-1))
