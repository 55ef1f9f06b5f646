"""Compares what several files say of the same rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rollbook.audit.auditor import Auditor
from rollbook.audit.places import Ints
from rollbook.audit.result import Kind
from rollbook.audit.tables import Summaries, Transcripts, rollout_name, rollout_place

Step = tuple[str, int]  # split, iteration


class Source(NamedTuple):
    """A file that tells of rollouts, by their keys."""

    what: str  # its lines are
    path: Path
    keys: Ints
    lines: Sequence[int]  # of each key
    is_whole: bool = True  # False: it was not, or not all of it was, read; what it lacks is known


def aligned(auditor: Auditor, step: Step, sources: Sequence[Source]) -> tuple[list[Ints], Ints]:
    """Where in each source the rollouts are that all of them have, in one order; and the keys of those that
    any of them has.

    A rollout that is twice in one, or only in some, is a finding.
    """
    first = sources[0].keys
    if all(np.array_equal(source.keys, first) for source in sources) and bool((np.diff(first) > 0).all()):
        return [np.arange(len(first))] * len(sources), first
    places = [_without_doubles(auditor, step, source) for source in sources]
    everywhere = np.unique(np.concatenate([source.keys for source in sources]))
    common = everywhere
    for source in sources:
        lacking = np.setdiff1d(everywhere, source.keys)
        if source.is_whole:
            for key in lacking.tolist():
                others = [other for other in sources if key in other.keys]
                _miss(auditor, step, key, source, others)
        common = np.setdiff1d(common, lacking)
    rows = [
        place[np.searchsorted(source.keys[place], common)]
        for source, place in zip(sources, places, strict=True)
    ]
    return rows, everywhere


def _without_doubles(auditor: Auditor, step: Step, source: Source) -> Ints:
    """Where each key is for the first time, in the order of the keys."""
    order = np.argsort(source.keys, kind="stable")
    is_again = np.concatenate([[False], np.diff(source.keys[order]) == 0])
    for place in np.flatnonzero(is_again).tolist():
        key, here, before = source.keys[order[place]], order[place], order[place - 1]
        auditor.find(
            Kind.DOUBLED,
            f"{rollout_name(int(key))} has a {source.what} on line {source.lines[before]} already",
            file=source.path,
            line=source.lines[here],
            key=label(step, int(key)),
        )
    kept: Ints = order[~is_again]
    return kept


def _miss(auditor: Auditor, step: Step, key: int, source: Source, others: Sequence[Source]) -> None:
    there = ", ".join(f"{auditor.name(other.path)} has it" for other in others)
    auditor.find(
        Kind.MISSING,
        f"{rollout_name(key)} has no {source.what} here; {there}",
        file=source.path,
        key=label(step, key),
    )


def compare_tables(
    auditor: Auditor, step: Step, one: Summaries, other: Transcripts, places: Sequence[Ints]
) -> None:
    """A rollout's summary against its transcript, column by column."""
    here, there = places
    columns: list[tuple[str, Any, Any]] = [
        ("status", _taken(one.statuses, here), _taken(other.statuses, there)),
        ("total_reward", one.rewards[here], other.rewards[there]),
        ("stop_reason", _taken(one.stops, here), _taken(other.stops, there)),
        ("task_id", _taken(one.tasks, here), _taken(other.tasks, there)),
        ("task_digest", _taken(one.digests, here), _taken(other.digests, there)),
    ]
    turns = np.where(other.has_turns[there], other.turns[there], one.turns[here])
    columns.append(("number of turns", one.turns[here], turns))
    for name, mine, theirs in (
        ("number of sampled tokens", one.tokens[here], other.tokens[there]),
        ("number of tokens seen", one.seen_tokens[here], other.seen_tokens[there]),
    ):
        is_unknown = np.isnan(mine) | np.isnan(theirs) | ~other.has_turns[there]
        columns.append((name, mine, np.where(is_unknown, mine, theirs)))
    wrong: dict[int, list[str]] = {}
    for name, mine, theirs in columns:
        for place in _differing(mine, theirs):
            difference = f"{name} is {_shown(theirs[place])} here and {_shown(mine[place])} in its summary"
            wrong.setdefault(place, []).append(difference)
    for place, said_K in wrong.items():
        key = int(one.keys[here[place]])
        auditor.find(
            Kind.DIFFERS,
            f"{rollout_name(key)}: {'; '.join(said_K)} (line {one.lines[here[place]]})",
            file=other.path,
            line=other.lines[there[place]],
            key=label(step, key),
        )
    auditor.check("summaries that agree with their transcripts", len(here) - len(wrong), len(here))


def label(step: Step, key: int) -> str:
    """A rollout as it is written after `--at`."""
    group, trajectory = rollout_place(key)
    return f"{step[0]}/{step[1]}/{group}/{trajectory}"


def _taken(values: list[Any], places: Ints) -> list[Any]:
    if len(places) == len(values) and bool((np.diff(places) == 1).all()):
        return values
    return [values[place] for place in places.tolist()]


def _differing(one: Any, other: Any) -> list[int]:
    if isinstance(one, list):
        if one == other:
            return []
        return [place for place, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
    is_same = one == other
    if one.dtype.kind == "f":
        is_same |= np.isnan(one) & np.isnan(other)
    found: list[int] = np.flatnonzero(~is_same).tolist()
    return found


def _shown(value: Any) -> str:
    if isinstance(value, float) and np.isnan(value):
        return "unknown"
    return (
        f"{value:.10g}" if isinstance(value, float) else repr(value) if isinstance(value, str) else str(value)
    )
