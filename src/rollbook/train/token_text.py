"""The text of rows of tokens, and where in it each token is, without asking the tokenizer for every row.

A token's own bytes are looked up once. A character may be spread over several tokens, so places are counted
in bytes of UTF-8; bytes that make no character become U+FFFD in the text, and the places move with it.
"""

from __future__ import annotations

import codecs
import json
import re
import threading
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # how vocabularies with byte fallback write a single byte
_REPLACED = "\N{REPLACEMENT CHARACTER}"
_ANCHOR = "a"
_bad = threading.local()


class RowTexts(NamedTuple):
    texts: list[str]
    offset_F: Array  # the byte of its row's text at which each token begins; the rows one after another


class TokenText:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items()}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = json.dumps(json.loads(backend.to_str()).get("decoder")) if backend is not None else ""
        self._byte_of = _bytes_of_characters() if "ByteLevel" in decoder else None
        self._falls_back = "ByteFallback" in decoder
        self._anchor = tokenizer.encode(_ANCHOR, add_special_tokens=False)
        # The bytes of each token of the vocabulary that was looked up so far, and their number; -1: not yet.
        self._piece_V: Array = np.empty(0, object)
        self._width_V: Array = np.empty(0, np.int32)

    def of(self, token_F: Array, bound_R: Array) -> RowTexts:
        """Rows of tokens as text, special ones included; `bound_R`: where each row begins, and the end."""
        self._look_up(token_F)
        data = b"".join(self._piece_V[token_F].tolist())
        place_F = np.zeros(len(token_F) + 1, np.int64)  # of each token in the bytes of all rows, and the end
        np.cumsum(self._width_V[token_F], out=place_F[1:])
        begin_R = place_F[bound_R]
        offset_F = (place_F[:-1] - np.repeat(begin_R[:-1], np.diff(bound_R))).astype(np.int32)
        texts = []
        for row, (begin, end) in enumerate(pairwise(begin_R.tolist())):
            try:
                texts.append(data[begin:end].decode())
            except UnicodeDecodeError:
                own = slice(bound_R[row], bound_R[row + 1])
                text, offset_F[own] = _with_replacements(data[begin:end], offset_F[own])
                texts.append(text)
        return RowTexts(texts, offset_F)

    def _look_up(self, token_F: Array) -> None:
        """Make the pieces of the tokens that were not seen before."""
        more = int(token_F.max(initial=-1)) + 1 - len(self._width_V)
        if more > 0:
            self._piece_V = np.concatenate([self._piece_V, np.empty(more, object)])
            self._width_V = np.concatenate([self._width_V, np.full(more, -1, np.int32)])
        is_new_F = self._width_V[token_F] < 0
        if not is_new_F.any():
            return
        tokens = np.unique(token_F[is_new_F]).tolist()
        names = self._tokenizer.convert_ids_to_tokens(tokens)
        for token, name in zip(tokens, names, strict=True):
            piece = self._piece(token, name)
            self._piece_V[token], self._width_V[token] = piece, len(piece)

    def _piece(self, token: int, name: str | None) -> bytes:
        """The bytes that a token stands for; `name` is how the vocabulary writes it."""
        if token in self._added:
            return self._added[token].encode()
        if name is None:  # the vocabulary has gaps
            return _REPLACED.encode()
        if self._byte_of is not None:
            piece, _ = codecs.charmap_encode(name, "ignore", self._byte_of)
            if len(piece) == len(name):  # each character of it stands for a byte
                return piece
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


def _bytes_of_characters() -> dict[int, int]:
    """The byte that each character of a byte-level vocabulary stands for."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    characters: Any = bytes_to_unicode
    return {ord(char): byte for byte, char in characters().items()}


def _note_and_replace(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    _bad.places.append((error.start, error.end))
    return _REPLACED, error.end


codecs.register_error("rollbook-replace", _note_and_replace)


def _with_replacements(data: bytes, offset_T: Array) -> tuple[str, Array]:
    """The text with U+FFFD for what is no character; a token that begins inside one begins where it does."""
    _bad.places = []
    text = data.decode(errors="rollbook-replace")
    moved_T = offset_T.astype(np.int64)
    width = len(_REPLACED.encode())
    for start, end in _bad.places:
        moved_T[offset_T >= end] += width - (end - start)
        inside_T = (offset_T > start) & (offset_T < end)
        moved_T[inside_T] += start - offset_T[inside_T]
    return text, moved_T.astype(np.int32)
