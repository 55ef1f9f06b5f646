"""Text into HTML, escaped exactly once, with everything invisible made visible.

Model output may hold terminal escapes, characters that reverse the line they stand in, or ones that take
no space at all. Each is shown as a small mark with its name and is itself absent from the page, so it can
neither mislead a reader nor travel along when text is copied.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

_CONTROL_BYTES = bytes({*range(0x20), 0x7F} - {0x09, 0x0A})
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad"
    "\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f"
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164"
    "\ud800-\udfff\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
_SHORT = 100
_JOINERS = "\u200c\u200d"
_EMOJI_STYLE = "\ufe0e\ufe0f"
_SHAPED = ("L", "M", "S")  # categories of characters that a joiner really joins

_C0_NAMES = (
    "NUL", "SOH", "STX", "ETX", "EOT", "ENQ", "ACK", "BEL", "BS", "HT", "LF", "VT", "FF", "CR", "SO", "SI",
    "DLE", "DC1", "DC2", "DC3", "DC4", "NAK", "SYN", "ETB", "CAN", "EM", "SUB", "ESC", "FS", "GS", "RS", "US",
)  # fmt: skip
_NAMES = dict(enumerate(_C0_NAMES)) | {
    0x7F: "DEL",
    0xAD: "SHY",
    0x61C: "ALM",
    0x200B: "ZWSP",
    0x200C: "ZWNJ",
    0x200D: "ZWJ",
    0x200E: "LRM",
    0x200F: "RLM",
    0x202A: "LRE",
    0x202B: "RLE",
    0x202C: "PDF",
    0x202D: "LRO",
    0x202E: "RLO",
    0x2060: "WJ",
    0x2066: "LRI",
    0x2067: "RLI",
    0x2068: "FSI",
    0x2069: "PDI",
    0xFEFF: "BOM",
}


def escape(text: str) -> str:
    """Text as element content."""
    if len(text) < _SHORT and text.isascii() and text.isalnum():  # most names and ids
        return text
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _HIDDEN.sub(_mark, escaped) if _may_hide(text) else escaped


def escape_plainly(text: str) -> str:
    """Text where no element can stand, such as the title of the window."""
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _HIDDEN.sub(_named_in_brackets, escaped) if _may_hide(text) else escaped


def attribute(name: str, value: str) -> str:
    """` name="value"`. The name is the caller's promise; the value may hold anything."""
    escaped = value.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
    if _may_hide(value):
        escaped = _HIDDEN.sub(_for_attribute, escaped)
    return f' {name}="{escaped}"'


def _may_hide(text: str) -> bool:
    if not text.isascii():
        return True
    if len(text) < _SHORT:
        return not text.isprintable()
    # Dropping the control bytes and comparing lengths is several times faster than a regular expression.
    raw = text.encode()
    return len(raw.translate(None, _CONTROL_BYTES)) != len(raw)


def _mark(match: re.Match[str]) -> str:
    char = match[0]
    if "\ud800" <= char <= "\udfff":
        return "\ufffd"
    if char == "\r" and match.string.startswith("\n", match.end()):
        return "&#13;"
    if _is_ordinary(match):
        return char
    return _marked(char)


@lru_cache(maxsize=1024)
def _marked(char: str) -> str:
    code = f"U+{ord(char):04X}"
    return f'<i class="c" title="{code}">{_NAMES.get(ord(char), code)}</i>'


def _named_in_brackets(match: re.Match[str]) -> str:
    return "\ufffd" if "\ud800" <= match[0] <= "\udfff" else f"[U+{ord(match[0]):04X}]"


def _for_attribute(match: re.Match[str]) -> str:
    # Only what an HTML parser would not hand back as it is.
    char = match[0]
    if char == "\r":
        return "&#13;"
    return "\ufffd" if char == "\0" or "\ud800" <= char <= "\udfff" else char


def _is_ordinary(match: re.Match[str]) -> bool:
    """A joiner or an emoji selector where it does what it is for: Persian, Hindi, a family emoji."""
    char, before = match[0], match.string[max(match.start() - 1, 0) : match.start()]
    if char in _EMOJI_STYLE:
        return bool(before) and (before in "0123456789#*" or unicodedata.category(before)[0] == "S")
    if char in _JOINERS:
        after = match.string[match.end() : match.end() + 1]
        before_joins = _is_shaped(before) or before in _EMOJI_STYLE
        return bool(before) and before_joins and _is_shaped(after)
    return False


def _is_shaped(char: str) -> bool:
    return char > "\u02ff" and unicodedata.category(char)[0] in _SHAPED and not _HIDDEN.match(char)
