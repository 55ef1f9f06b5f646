"""Keys and seeds that are the same wherever they are made again."""

from __future__ import annotations

import hashlib
import json

_SEED_BITS = 53  # every reader of JSON keeps such a number exact


def derive_seed(*parts: int | str) -> int:
    """A seed that follows from its parts alone: (run seed, iteration, environment, task, sample, turn)."""
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - _SEED_BITS)
