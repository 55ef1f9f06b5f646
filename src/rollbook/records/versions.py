"""Refuses what a newer rollbook wrote: read by this one it would give wrong numbers, not fewer."""

from __future__ import annotations

from typing import Any


def made_by_newer(version: Any, known: int) -> str | None:
    """Why a record of this `schema_version` cannot be read; None if it can."""
    if not isinstance(version, int) or version <= known:
        return None
    return (
        f"has schema_version {version}, made by a newer rollbook; this one knows {known}: upgrade it, with "
        "pip install --upgrade rollbook"
    )
