"""Which tokens a loss left out, by their text and the sign of the advantage.

A share of masked tokens says little; that most of the ones with a positive advantage are one tag says much.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum

import msgspec
import numpy as np

from rollbook.tokens.chunks import Array, Chunk


class Sign(StrEnum):
    POSITIVE = "positive"
    NEGATIVE = "negative"
    ZERO = "zero"


class MaskedText(msgspec.Struct, kw_only=True):
    """A token of the vocabulary among those with one sign of the advantage."""

    text: str
    token_id: int
    masked: int
    seen: int  # how often the loss saw it
    share: float  # of all masked tokens of this sign
    masked_share: float  # of the times it was seen


class MaskedSide(msgspec.Struct, kw_only=True):
    """All tokens with one sign of the advantage."""

    seen: int
    masked: int
    texts: int  # different tokens among the masked ones
    top: list[MaskedText]  # the ones masked most often


_SIGNS = list(Sign)


class TextCounts:
    """Keeps two numbers for each token of the vocabulary and sign."""

    def __init__(self) -> None:
        self._seen: dict[Sign, Counter[int]] = {sign: Counter() for sign in Sign}
        self._masked: dict[Sign, Counter[int]] = {sign: Counter() for sign in Sign}
        self._texts: dict[int, str] = {}

    def add(self, chunk: Chunk) -> None:
        """Only tokens of sequences in which a loss said what it left out."""
        known_N = chunk.has("is_masked")
        if not known_N.any():
            return
        token_N, masked_N = chunk.token_N, chunk.flags("is_masked")
        sign_N = _signs(chunk.floats("advantages"))
        for number, sign in enumerate(_SIGNS):
            mine_N = known_N & (sign_N == number)
            self._seen[sign].update(_counted(token_N[mine_N]))
            self._masked[sign].update(_counted(token_N[mine_N & masked_N]))
        self._learn_texts(chunk, token_N, np.flatnonzero(known_N & masked_N))

    def side(self, sign: Sign, most: int) -> MaskedSide:
        seen, masked = self._seen[sign], self._masked[sign]
        together = masked.total()
        return MaskedSide(
            seen=seen.total(),
            masked=together,
            texts=len(masked),
            top=[
                MaskedText(
                    text=self._texts[token],
                    token_id=token,
                    masked=count,
                    seen=seen[token],
                    share=count / together,
                    masked_share=count / seen[token],
                )
                for token, count in sorted(masked.items(), key=lambda item: (-item[1], item[0]))[:most]
            ],
        )

    def _learn_texts(self, chunk: Chunk, token_N: Array, place_M: Array) -> None:
        tokens, first = np.unique(token_N[place_M], return_index=True)
        for token, place in zip(tokens.tolist(), place_M[first].tolist(), strict=True):
            if token not in self._texts:
                self._texts[token] = chunk.text(place)


def _signs(advantage_N: Array) -> Array:
    """The number of each token's sign; an advantage that nobody knows moves nothing either."""
    return np.where(advantage_N > 0, 0, np.where(advantage_N < 0, 1, 2))


def _counted(token_N: Array) -> dict[int, int]:
    tokens, counts = np.unique(token_N, return_counts=True)
    return dict(zip(tokens.tolist(), counts.tolist(), strict=True))
