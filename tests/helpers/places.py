"""Where the tests find what is not theirs."""

from __future__ import annotations

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
SHARED = REPOSITORY.parent / "shared"  # real outputs of other systems, where they are beside the checkout
