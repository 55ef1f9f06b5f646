"""Exponential random numbers without a state: each is a function of (seed, position, token) alone.

A sampled token therefore does not depend on which other requests run, in which order they came or in which
slot they are, and a request sampled again gives the same tokens. The token with the largest p / E is a draw
from p (an exponential race).

The seed counts in full: its 64 bits are spread over two words, and both go into every number. Numbers are
`-log1p(-u)` of a u with 31 bits: small values, which decide the race, keep their precision down to 2^-32, so
tokens up to 22 nats down can still be drawn. `-log(u)` in float32 would cut them off at 17.
"""

from __future__ import annotations

import torch
from torch import Tensor

_M32, _M64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
_STEP = 0x9E3779B9 - 2**32  # odd: positions of one seed never meet within 2^32
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B - 2**32  # multipliers of a well tested 32-bit mixer
# u = (h + 1/2) / 2^31, scaled down so far that float32 cannot round it to 1, where E would be infinite.
_SCALE = 2.0**-31 * (1 - 2.0**-24)


def seed_words(seed: int) -> tuple[int, int]:
    """Two int32 words that hold the 64 bits of a seed, mixed so that near seeds have nothing in common."""
    if not 0 <= seed <= _M64:
        raise ValueError(f"a seed must be between 0 and 2^64 - 1, not {seed}")
    h = (seed + 0x9E3779B97F4A7C15) & _M64  # every step can be undone: no two seeds share their words
    h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & _M64
    h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & _M64
    h ^= h >> 31
    return _signed(h & _M32), _signed(h >> 32)


def token_words(vocabulary: int, device: torch.device | str = "cpu") -> Tensor:
    """One int32 word per token of the vocabulary, for `exponential`."""
    word_V = torch.arange(vocabulary, dtype=torch.int32, device=device)
    for multiplier in (_SECOND, _FIRST):
        word_V = _shifted_xor(word_V, 16).mul_(multiplier)
    return _shifted_xor(word_V, 16)


def exponential(words_S2: Tensor, position_S: Tensor, token_V: Tensor) -> Tensor:
    """S x V exponential numbers, for rows with the seeds `words_S2` that sample at `position_S`."""
    key_S1 = (words_S2[:, 0] + position_S.to(torch.int32) * _STEP)[:, None]
    h_SV = _shifted_xor(token_V + key_S1, 16).mul_(_FIRST)
    h_SV = _shifted_xor(h_SV, 15).add_(words_S2[:, 1:]).mul_(_SECOND)
    return of_bits(_shifted_xor(h_SV, 16).bitwise_and_(0x7FFFFFFF))


def of_bits(h: Tensor) -> Tensor:
    """The exponential number that 31 random bits stand for."""
    return h.float().mul_(-_SCALE).sub_(2.0**-32).log1p_().neg_()


def _shifted_xor(h: Tensor, bits: int) -> Tensor:
    """`h ^ (h >> bits)`; torch shifts signed integers with their sign, so that is masked off."""
    return (h >> bits).bitwise_and_((1 << (32 - bits)) - 1).bitwise_xor_(h)


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word
