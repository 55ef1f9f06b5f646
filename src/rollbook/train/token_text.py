"""The text of a row of tokens, and where in it each token is, without asking the tokenizer for every row.

A token's own bytes are looked up once. A character may be spread over several tokens, so places are counted
in bytes of UTF-8; bytes that make no character become U+FFFD in the text, and the places move with it.
"""

from __future__ import annotations

import codecs
import json
import re
import threading
from typing import Any, NamedTuple

import numpy as np

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # how vocabularies with byte fallback write a single byte
_REPLACED = "\N{REPLACEMENT CHARACTER}"
_ANCHOR = "a"
_bad = threading.local()


class RowText(NamedTuple):
    text: str
    offset_T: np.ndarray[Any, np.dtype[np.int32]]  # the byte of the text at which each token begins


class TokenText:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items()}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = json.dumps(json.loads(backend.to_str()).get("decoder")) if backend is not None else ""
        self._byte_of = _bytes_of_characters() if "ByteLevel" in decoder else None
        self._falls_back = "ByteFallback" in decoder
        self._anchor = tokenizer.encode(_ANCHOR, add_special_tokens=False)
        self._known = _Pieces(self)

    def of(self, token_T: np.ndarray[Any, Any]) -> RowText:
        """The tokens as text, special ones included."""
        pieces = [*map(self._known.__getitem__, token_T.tolist())]
        data = b"".join(pieces)
        end_T = np.fromiter(map(len, pieces), np.int32, len(pieces)).cumsum(dtype=np.int32)
        offset_T = np.concatenate([np.zeros(1, np.int32), end_T[:-1]])
        try:
            return RowText(data.decode(), offset_T)
        except UnicodeDecodeError:
            return _with_replacements(data, offset_T)

    def piece(self, token: int) -> bytes:
        """The bytes that a token stands for."""
        if token in self._added:
            return self._added[token].encode()
        name = self._tokenizer.convert_ids_to_tokens(token)
        if name is None:  # the vocabulary has gaps
            return _REPLACED.encode()
        if self._byte_of is not None and all(char in self._byte_of for char in name):
            return bytes(self._byte_of[char] for char in name)
        if self._falls_back and (match := _BYTE.fullmatch(name)):
            return bytes([int(match[1], 16)])
        return self._decoded(token).encode()

    def _decoded(self, token: int) -> str:
        """What a token adds to the text of another one, because some decoders drop a leading space."""
        before = self._decode(self._anchor)
        text = self._decode([*self._anchor, token])
        return text.removeprefix(before) if text.startswith(before) else self._decode([token])

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(
            tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text


class _Pieces(dict[int, bytes]):
    """The pieces that were looked up so far."""

    def __init__(self, owner: TokenText) -> None:
        self._owner = owner

    def __missing__(self, token: int) -> bytes:
        piece = self[token] = self._owner.piece(token)
        return piece


def _bytes_of_characters() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    characters: Any = bytes_to_unicode
    return {char: byte for byte, char in characters().items()}


def _note_and_replace(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    _bad.places.append((error.start, error.end))
    return _REPLACED, error.end


codecs.register_error("rollbook-replace", _note_and_replace)


def _with_replacements(data: bytes, offset_T: np.ndarray[Any, np.dtype[np.int32]]) -> RowText:
    """The text with U+FFFD for what is no character; a token that begins inside one begins where it does."""
    _bad.places = []
    text = data.decode(errors="rollbook-replace")
    moved_T = offset_T.astype(np.int64)
    width = len(_REPLACED.encode())
    for start, end in _bad.places:
        moved_T[offset_T >= end] += width - (end - start)
        inside_T = (offset_T > start) & (offset_T < end)
        moved_T[inside_T] += start - offset_T[inside_T]
    return RowText(text, moved_T.astype(np.int32))
