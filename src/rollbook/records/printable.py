"""Text for a terminal, in which an escape sequence of a model must not move the cursor or hide text.

`printable` is for text that we show; `ProgramOutput` for what a program of the user's writes to the terminal,
whose colours and progress bars are to work; `printable_json` for JSON, which keeps its meaning;
`csv_cell` for CSV.
"""

from __future__ import annotations

import codecs
import re
import unicodedata
from collections.abc import Callable
from typing import Any

from rollbook.records.line_secrets import LineSecrets

# Colours, and the moves that a progress bar makes. Everything else (titles, the clipboard, links, questions
# that a terminal answers as if somebody had typed) is shown, not done.
_OF_BARS = re.compile(r"(\x1b\[(?:[0-9;]{0,32}[A-HJKSTm]|\?25[hl])|[\r\b])")
_OF_FORMULAS = ("=", "+", "-", "@", "\t", "\r")
_UNFINISHED = re.compile(r"\x1b(?:\[[0-9;?]{0,33})?\Z")


def printable(text: str) -> str:
    """Control and format characters as visible code points; newlines and tabs stay."""
    return _changed(text, lambda char: f"<U+{ord(char):04X}>")


def printable_json(text: str) -> str:
    """The same JSON with such characters written as escapes."""

    def escaped(char: str) -> str:
        data = char.encode("utf-16-be", "surrogatepass")
        return "".join(f"\\u{data[place : place + 2].hex()}" for place in range(0, len(data), 2))

    return _changed(text, escaped)


def csv_cell(value: Any) -> Any:
    """A value for a CSV file; text that a spreadsheet would run as a formula gets a quote before it."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_OF_FORMULAS) else value


def terminal_text(text: str) -> str:
    """Like `printable`, but colours and progress bars work."""
    if _is_plain(text):
        return text
    return "".join(
        piece if place % 2 else printable(piece) for place, piece in enumerate(_OF_BARS.split(text))
    )


class ProgramOutput:
    """Bytes of a program as they may reach a terminal: `feed` what came, write what it returns."""

    def __init__(self, *, keeps_bars: bool) -> None:
        self._change = terminal_text if keeps_bars else printable
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._held = ""  # the beginning of a sequence

    def feed(self, data: bytes, *, is_last: bool = False) -> bytes:
        text = self._held + self._decoder.decode(data, is_last)
        begun = None if is_last else _UNFINISHED.search(text)
        self._held = begun[0] if begun else ""
        return self._change(text[: len(text) - len(self._held)]).encode()


class CleanedStream:
    """Standard output or error of a command: no known secret is written, and no control character shown."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._is_terminal = stream, stream.isatty()
        self._secrets: LineSecrets | None = None

    def write(self, text: str) -> int:
        self._secrets = self._secrets or LineSecrets()
        clean = self._secrets.cleaned(text.encode("utf-8", "surrogatepass")).decode("utf-8", "surrogatepass")
        self._stream.write(terminal_text(clean) if self._is_terminal else clean)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _is_plain(text: str) -> bool:
    return text.replace("\n", "").replace("\t", "").isprintable()


def _changed(text: str, change: Callable[[str], str]) -> str:
    if _is_plain(text):
        return text
    return "".join(
        char if char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cf", "Cs") else change(char)
        for char in text
    )
