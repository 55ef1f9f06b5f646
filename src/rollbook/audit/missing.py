"""Whether what is missing is like what is there: are the missing ones the long ones, or the bad ones?

A rollout that is not there has no length of its own, so the other rollouts of its prompt stand for it. If
rollouts went missing by chance, their prompts would be like all others. Rollouts that are there and were left
out of training are compared by their own lengths.
"""

from __future__ import annotations

import math

import numpy as np

from rollbook.audit.places import Floats, Ints, Moments, Places, numbered
from rollbook.audit.result import Comparison
from rollbook.records.iterations import Fate

_FEW = 5  # say nothing about fewer
_SURE = 3.0  # standard errors
_BY_OTHERS = "the other rollouts of their prompts"
_BY_OWN = "their own lengths"
_LEFT_OUT = (Fate.SURPLUS, Fate.CONSTANT, Fate.LONE, Fate.TRUNCATED, Fate.DROPPED)


class _Drift:
    """How far the prompts of absent rollouts are from all prompts, in one number per rollout."""

    def __init__(self) -> None:
        self.count = 0
        self._theirs = self._others = self._variance = 0.0

    def add(self, groups: Ints, values: Floats, absent: Ints) -> None:
        """`groups` and `values` of the rollouts that are there, and the groups of those that are not."""
        known = ~np.isnan(values)
        names, group = numbered(groups[known])
        if len(names) < 2 or not len(absent):
            return
        means = np.bincount(group, weights=values[known]) / np.bincount(group)
        place = np.searchsorted(names, absent)
        place = place[(place < len(names)) & (names[np.minimum(place, len(names) - 1)] == absent)]
        times = np.bincount(place, minlength=len(names))
        self.count += int(times.sum())
        self._theirs += float((times * means).sum())
        self._others += float(times.sum() * means.mean())
        self._variance += float(np.square(times).sum() * means.var())

    def result(self) -> tuple[float, float, float | None] | None:
        """Mean of theirs, of the others, and the difference in standard errors."""
        if not self.count:
            return None
        z = (self._theirs - self._others) / math.sqrt(self._variance) if self._variance > 0 else None
        return self._theirs / self.count, self._others / self.count, z


class LeftOut:
    """Everything that is not there, iteration after iteration."""

    def __init__(self) -> None:
        self._drifts: dict[str, tuple[_Drift, _Drift]] = {}
        self._counts: dict[str, int] = {}

    def add(self, name: str, groups: Ints, tokens: Floats, rewards: Floats, absent: Ints) -> None:
        if not len(absent):
            return
        lengths, scores = self._drifts.setdefault(name, (_Drift(), _Drift()))
        self._counts[name] = self._counts.get(name, 0) + len(absent)
        lengths.add(groups, tokens, absent)
        scores.add(groups, rewards, absent)

    def comparisons(self, places: Places) -> list[Comparison]:
        found = []
        for name, (lengths, scores) in self._drifts.items():
            made = Comparison(name=name, rollouts=self._counts[name], basis=_BY_OTHERS)
            if (drift := lengths.result()) is not None:
                made.tokens, made.other_tokens, made.tokens_z = drift
            if (drift := scores.result()) is not None:
                made.reward, made.other_reward, made.reward_z = drift
            made.says = _says(made, lengths.count)
            found.append(made)
        return found + _of_training(places)


def _of_training(places: Places) -> list[Comparison]:
    """What was sampled and not trained, beside what was."""
    found = []
    for fate in _LEFT_OUT:
        theirs, others = (places.lengths("train", name) for name in (fate, Fate.TRAINED))
        if not theirs.count or not others.count:
            continue
        scores, other_scores = (places.rewards("train", name) for name in (fate, Fate.TRAINED))
        made = Comparison(
            name=str(fate),
            rollouts=theirs.count,
            basis=_BY_OWN,
            tokens=theirs.mean,
            other_tokens=others.mean,
            tokens_z=_welch(theirs, others),
            reward=scores.mean,
            other_reward=other_scores.mean,
            reward_z=_welch(scores, other_scores),
        )
        made.says = _says(made, theirs.count)
        found.append(made)
    return found


def _welch(one: Moments, other: Moments) -> float | None:
    if one.mean is None or other.mean is None:
        return None
    variance = one.variance / one.count + other.variance / other.count
    return (one.mean - other.mean) / math.sqrt(variance) if variance > 0 else None


def _says(made: Comparison, known: int) -> str:
    if not known:
        return "nothing is known of their lengths"
    if known < _FEW:
        return "too few to tell"
    z = made.tokens_z or 0.0
    if abs(z) < _SURE:
        return "no sign that they are the long ones, or the short ones"
    assert made.tokens is not None and made.other_tokens is not None
    ratio = f"{made.tokens / made.other_tokens:.2f}" if made.other_tokens else "many"
    return f"these are the {'long' if z > 0 else 'short'} ones: {ratio} times as long as the others"
