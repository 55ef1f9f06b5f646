"""Text for a terminal, in which an escape sequence of a model must not move the cursor or hide text."""

from __future__ import annotations

import unicodedata


def printable(text: str) -> str:
    """Control and format characters as visible code points; newlines and tabs stay."""
    return "".join(
        char
        if char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cf", "Cs")
        else f"<U+{ord(char):04X}>"
        for char in text
    )
