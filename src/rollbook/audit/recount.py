"""The metrics of an iteration, counted once more from its rollouts, its fates and its steps.

The formulas are those of docs/metrics.md. This is on purpose not the code that wrote metrics.jsonl: an audit
that used it would repeat its mistakes. It is also written for whole columns, so that a million rollouts take
seconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from rollbook.audit.places import NUMBERS, Bools, Floats, Ints, numbered
from rollbook.audit.tables import Summaries
from rollbook.records.iterations import Fate, TrainStep
from rollbook.records.layout import TRAIN
from rollbook.records.tokens import TokenSequence

_GOOD_FROM = 0.5
# A group counts once, under the first of these fates that a rollout of it has.
_VERDICTS = (Fate.TRAINED, Fate.SURPLUS, Fate.CONSTANT, Fate.LONE, Fate.TRUNCATED, Fate.FAILED)
MASKS = ("is_masked", "is_masked_high", "is_masked_low")  # columns of a token export
Values = dict[str, float]


def of_rollouts(summaries: Summaries, split: str) -> Values:
    """The `env/...` metrics."""
    prefix = "" if split == TRAIN else f"{split.removeprefix('eval/')}/"
    everything = np.ones(len(summaries), np.bool_)
    metrics = {name: own for name, own in summaries.metrics.items() if not name.startswith("stop/")}
    found = _scope(summaries, metrics, everything)
    per_turn = found.pop("ac_tokens_per_turn", None)
    values = {f"{prefix}env/all/{name}": value for name, value in found.items()}
    if per_turn is not None:
        values[f"{prefix}ac_tokens_per_turn"] = per_turn  # documented without the scope
    for tag, inside in _tags(summaries).items():
        values |= {
            f"{prefix}env/{tag}/{name}": value for name, value in _scope(summaries, metrics, inside).items()
        }
    return values


def _tags(summaries: Summaries) -> dict[str, Bools]:
    """Which rollouts have each tag, where one of the tags is not on all of them."""
    tags = summaries.tags
    if not tags or tags.count(tags[0]) == len(tags):
        return {}
    names = sorted({tag for some in tags for tag in some} - {"all"})
    return {tag: np.array([tag in some for some in tags], np.bool_) for tag in names}


def _scope(summaries: Summaries, metrics: dict[str, Floats], inside: Bools) -> Values:
    ok = inside & summaries.ok
    count, turns = int(ok.sum()), int(summaries.turns[ok].sum())
    values: Values = {}
    for name, numbers in metrics.items():
        own = numbers[ok & ~np.isnan(numbers)]
        if len(own):
            values[name] = float(own.mean())
            if len(own) < count:
                values[f"{name}:count"] = len(own)
    values |= {"rollouts/ok": count, "rollouts/failed": int(inside.sum()) - count}
    rewards = summaries.rewards[ok]
    known = rewards[np.isfinite(rewards)]
    if len(known):
        values |= {
            "reward/total": float(known.mean()),
            "reward/min": float(known.min()),
            "reward/max": float(known.max()),
        }
    if len(known) > 1:
        std = float(known.std(ddof=1))
        values |= {"reward/std": std, "reward/std_error": std / math.sqrt(len(known))}
    if len(known) < count:
        values["reward/total:count"] = len(known)
    values |= {"total_episodes": count, "total_turns": turns}
    if turns:
        values["turns_per_episode"] = turns / count
    ok_turns = np.repeat(ok, summaries.turns)
    values |= _lengths("ac_tokens", summaries.sampled[ok_turns])
    values |= _lengths("ob_tokens", summaries.seen[ok_turns])
    stops = Counter(
        [stop for stop, is_ok in zip(summaries.stops, ok.tolist(), strict=True) if is_ok and stop]
    )
    values |= {f"stop/{reason}": number / count for reason, number in stops.items()}
    return values | _by_group(summaries.groups[ok], rewards)


def _lengths(name: str, lengths: Ints) -> Values:
    known = lengths[lengths >= 0]
    values: Values = {}
    if len(known):
        values[f"{name}_per_turn"] = float(known.sum()) / len(known)
    if len(known) or not len(lengths):
        values[f"total_{name}"] = int(known.sum())
    if len(known) < len(lengths):
        values[f"{name}_per_turn:count"] = len(known)
    return values


def _by_group(groups: Ints, rewards: Floats) -> Values:
    is_known = np.isfinite(rewards)
    if not is_known.any():
        return {}
    names, group = numbered(groups[is_known])
    low, high = np.full(len(names), np.inf), np.full(len(names), -np.inf)
    np.minimum.at(low, group, rewards[is_known])
    np.maximum.at(high, group, rewards[is_known])
    constant = low == high
    good = int((low[constant] >= _GOOD_FROM).sum())
    bad = int(constant.sum()) - good
    return {
        "by_group/frac_mixed": 1 - (good + bad) / len(names),
        "by_group/frac_all_good": good / len(names),
        "by_group/frac_all_bad": bad / len(names),
    }


def of_cuts(replies: Bools, episodes: Bools, ok: Bools) -> Values:
    """Which limits ended something; one value per rollout."""
    cuts = {"truncated/reply": replies, "truncated/episode": episodes}
    return {name: int((cut & ok).sum()) / int(ok.sum()) for name, cut in cuts.items() if ok.any()}


def of_fates(groups: Ints, places: Ints, cut_off: Bools, ok: Bools, tokens: Floats) -> Values:
    """What was sampled, and what of it is trained; one value per rollout."""
    names, group = numbered(groups)
    verdicts = np.full(len(names), len(_VERDICTS))
    for number, fate in enumerate(_VERDICTS):
        np.minimum.at(verdicts, group[places == NUMBERS[fate]], number)
    values: Values = {"groups/drawn": len(names)}
    for number, fate in enumerate(_VERDICTS):
        values[f"groups/{fate}"] = int((verdicts == number).sum())
    values["rollouts/trained"] = int((places == NUMBERS[Fate.TRAINED]).sum())
    values["truncated/count"] = int((cut_off & ok).sum())
    if ok.any():
        values["truncated/share"] = int((cut_off & ok).sum()) / int(ok.sum())
    if not np.isnan(tokens[ok]).any():
        values["tokens/sampled"] = int(tokens[ok].sum())
    return values


def of_steps(steps: Sequence[TrainStep]) -> Values:
    values: Values = {"optim/steps": len(steps)}
    losses = [step.loss for step in steps]
    norms = [step.grad_norm for step in steps]
    if steps:
        values["optim/lr"] = steps[0].learning_rate
        values["optim/applied"] = sum(step.applied for step in steps) / len(steps)
    if losses and None not in losses:
        values["optim/loss"] = math.fsum(_numbers(losses)) / len(losses)
    if norms and None not in norms:
        values["optim/grad_norm"] = max(_numbers(norms))
    return values


class MaskCounts:
    """What the loss left out of the tokens of all steps, counted in the records of a token export."""

    def __init__(self) -> None:
        self._tokens = 0
        self._counts = dict.fromkeys(MASKS, 0)
        self._is_known = True  # in every record so far

    def add(self, sequence: TokenSequence) -> None:
        columns = [sequence.get(name) for name in MASKS]
        self._tokens += int(sequence.sampled.sum())
        for name, column in zip(MASKS, columns, strict=True):
            if column is None:  # the loss leaves nothing out, or the export has no such column
                self._is_known = False
            else:
                self._counts[name] += int(column[sequence.sampled].sum())

    def values(self) -> Values:
        if not self._is_known or not self._tokens:
            return {}
        masked, high, low = (self._counts[name] / self._tokens for name in MASKS)
        return {"loss/kept": 1 - masked, "loss/clipped_high": high, "loss/clipped_low": low}


def _numbers(values: Sequence[Any]) -> list[float]:
    return [float(value) for value in values]
