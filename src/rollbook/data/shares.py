"""What a mix is made of: sources with shares, and how many rows of each that means.

Counts are exact: each source has its share of the total rounded down, and the rows that are left go to the
largest remainders. They always add up to the total and are never a whole row away from the share.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from rollbook.errors import UsageError

_TOLERANCE = Fraction(1, 1000)  # three thirds may be typed as 0.333
_NUMBER = re.compile(r"[0-9]*\.?[0-9]+([eE][-+]?[0-9]{1,3})?|[0-9]+\.")
_EXAMPLE = "high_quality=train_high_quality.jsonl:0.6"


class Shortfall(StrEnum):
    """What to do when a source has fewer rows than its share asks for."""

    ERROR = "error"
    SHRINK = "shrink"  # a smaller total, so that the shares stay as they are
    REPEAT = "repeat"  # every row of that source as often as needed


class Source(NamedTuple):
    name: str
    words: tuple[str, ...]  # files, directories or globs
    share: Fraction  # of one; all sources together are one


def parse_sources(words: Sequence[str]) -> list[Source]:
    """`name=path[,path...]:share`; a path may hold colons and equal signs, a lone one also commas."""
    given = [_parsed(word) for word in words]
    if not given:
        raise UsageError(f"no sources; name each as {_EXAMPLE}")
    names = [source.name for source in given]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"the source {twice!r} is given twice; join its files with commas")
    total = sum((source.share for source in given), Fraction(0))
    if abs(total - 1) > _TOLERANCE:
        hint = ", ".join(f"{source.name} {float(source.share / total):.4g}" for source in given)
        raise UsageError(f"the shares sum to {float(total):g}, not to 1; in these proportions: {hint}")
    return [source._replace(share=source.share / total) for source in given]


def _parsed(word: str) -> Source:
    name, equals, rest = word.partition("=")
    paths, colon, share = rest.rpartition(":")
    if not (equals and colon and name.strip() and paths):
        raise UsageError(f"{word!r}: a source is written name=path:share, such as {_EXAMPLE}")
    if not _NUMBER.fullmatch(share) or Fraction(share) <= 0:
        raise UsageError(f"{word!r}: the share {share!r} must be a number above 0, such as 0.6")
    words = [paths] if Path(paths).exists() else paths.split(",")
    return Source(name.strip(), tuple(word for word in words if word), Fraction(share))


def counts_of(total: int, shares: Sequence[Fraction]) -> list[int]:
    """The largest remainder method; equal remainders go to the source named first."""
    quotas = [total * share for share in shares]
    counts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(shares)), key=lambda index: counts[index] - quotas[index])
    for index in by_remainder[: total - sum(counts)]:
        counts[index] += 1
    return counts


def largest_total(available: Sequence[int], shares: Sequence[Fraction]) -> int:
    """The largest total of which no source's share is more than it has."""
    return min(int(rows / share) for rows, share in zip(available, shares, strict=True))


def plan_counts(
    sources: Sequence[Source], available: Sequence[int], total: int | None, policy: Shortfall
) -> list[int]:
    """How many rows to take of each source, under the policy for what it does not have."""
    shares = [source.share for source in sources]
    if empty := next((source for source, rows in zip(sources, available, strict=True) if rows == 0), None):
        raise UsageError(f"the source {empty.name} has no rows; leave it out or name other files")
    most = largest_total(available, shares)
    if total is None:
        wanted = most
    elif policy is Shortfall.SHRINK:
        wanted = min(total, most)
    else:
        wanted = total
    if wanted < 1:
        raise UsageError("no row can be taken in these shares; a source has too few rows")
    counts = counts_of(wanted, shares)
    if policy is Shortfall.ERROR and any(count > rows for count, rows in zip(counts, available, strict=True)):
        raise UsageError(_shortfall(sources, available, counts, most))
    return counts


def _shortfall(sources: Sequence[Source], available: Sequence[int], counts: Sequence[int], most: int) -> str:
    listed = "\n  ".join(
        f"{source.name}: {count} wanted, {rows} available" + (" (too few)" if count > rows else "")
        for source, rows, count in zip(sources, available, counts, strict=True)
    )
    return (
        f"these sources cannot fill the mix:\n  {listed}\n"
        f"--total {most} fits; or add --shortfall shrink (keeps the shares) or --shortfall repeat"
    )
