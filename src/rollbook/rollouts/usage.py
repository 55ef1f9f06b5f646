"""Token counts as servers report them: under two pairs of names, sometimes as 5.0, sometimes absurd."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rollbook.records.turns import Turn, Usage

MOST_TOKENS = 0x7FFFFFFF  # that a server may claim


def usage_from(
    counts: Any, input_name: str = "input_tokens", output_name: str = "output_tokens"
) -> Usage | None:
    """The counts of a mapping; None where nobody counted, for no request and answer have no token."""
    if not isinstance(counts, Mapping):
        return None
    usage = Usage(clamp_tokens(counts.get(input_name)), clamp_tokens(counts.get(output_name)))
    if isinstance(details := counts.get(f"{output_name}_details"), Mapping):
        usage.reasoning_tokens = clamp_tokens(details.get("reasoning_tokens"))
    if isinstance(details := counts.get(f"{input_name}_details"), Mapping):
        usage.cached_tokens = clamp_tokens(details.get("cached_tokens"))
    return usage if is_counted(usage) else None


def clamp_tokens(value: Any) -> int:
    """A number of tokens between 0 and MOST_TOKENS; what is no number of tokens is 0."""
    if type(value) is float and value.is_integer():
        value = int(value)
    return min(max(value, 0), MOST_TOKENS) if type(value) is int else 0


def is_counted(usage: Usage | None) -> bool:
    return usage is not None and (usage.input_tokens > 0 or usage.output_tokens > 0)


def known_usage(turns: Iterable[Turn]) -> Usage:
    """The sum over the turns that were counted."""
    total = Usage()
    for turn in turns:
        if turn.usage is not None:
            for name in Usage.__struct_fields__:
                setattr(total, name, getattr(total, name) + getattr(turn.usage, name))
    return total
