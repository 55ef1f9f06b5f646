"""Private keys in text, between the lines that say where they begin and end."""

from __future__ import annotations

import re

from rollbook.records.later import compiled_later

_MIN_PEM_LINE = 32
_PEM_MARK = compiled_later(r"-----(BEGIN|END) [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
_PEM_ON_ONE_LINE = compiled_later(_PEM_MARK.pattern + r"(?:\\[nr]|[A-Za-z0-9+/=]){32,}")
_PEM_BODY = compiled_later(
    r"([ +-]?[ \t\"']*)([A-Za-z0-9+/=]+|(?:Proc-Type|DEK-Info|Version|Comment):[^\n]*|)"
    r"((?:\\[nr])*[\"',)]*[ \t\r]*)"
)


def redact_pem(text: str, mark: str) -> str:
    """Replace a key's body by `mark`, line by line; a first line that only stands in code has no body."""
    text = _PEM_ON_ONE_LINE.sub(lambda match: f"-----{match[1]} PRIVATE KEY-----{mark}", text)
    lines = text.split("\n")
    for index, line in enumerate(lines):
        # A hunk can show the end of a key without its beginning.
        for end in _PEM_MARK.finditer(line):
            _redact_body(lines, index, mark, step=1 if end[1] == "BEGIN" else -1)
    return "\n".join(lines)


def _redact_body(lines: list[str], index: int, mark: str, step: int) -> None:
    # Short lines are held until one of full length proves that this is a key.
    held: list[tuple[int, re.Match[str]]] = []
    proved = False
    while 0 <= (index := index + step) < len(lines):
        match = _PEM_BODY.fullmatch(lines[index])
        if match is None or len(held) == 4:
            return
        held.append((index, match))
        proved = proved or len(match[2]) >= _MIN_PEM_LINE
        while proved and held:
            at, body = held.pop()
            lines[at] = f"{body[1]}{mark if body[2] else ''}{body[3]}"
