"""The `env/...` metrics of one batch of rollouts, with the counts that make the means honest.

Means are over the trajectories that ended well; `rollouts/expected`, `ok`, `failed` and `missing` stand
beside them. A metric is averaged over the steps of a trajectory first and over trajectories second, so long
episodes do not outweigh short ones; when only some trajectories emitted it, `<metric>:count` says how many.
`stop/<reason>` is the fraction of trajectories that stopped for that reason, so a truncation rate is a
column. Memory does not grow with the number of trajectories, only with the number of groups.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import Any

from rollbook.records.numbers import std_error
from rollbook.records.plain import to_plain
from rollbook.records.rollouts import RolloutSummary, Status

_SHIFT = 1074
_GOOD_FROM = 0.5  # an all-equal group counts as all good from this reward on


class ExactMean:
    """Mean, spread and range of numbers, the same to the last bit in whatever order they come.

    Rollouts end in another order each time, and a resumed run has to log what an untouched one logs. So the
    sums are whole numbers: a float is a multiple of 2**-1074.
    """

    def __init__(self) -> None:
        self.count = 0
        self.low, self.high = math.inf, -math.inf
        self._sum = self._squares = 0

    def add(self, value: float) -> None:
        numerator, denominator = value.as_integer_ratio()
        whole = numerator << (_SHIFT + 1 - denominator.bit_length())
        self.count += 1
        self._sum += whole
        self._squares += whole * whole
        self.low, self.high = min(self.low, value), max(self.high, value)

    @property
    def mean(self) -> float:
        return self._sum / (self.count << _SHIFT) if self.count else 0.0

    @property
    def std(self) -> float | None:
        """Of a sample (n - 1); None for fewer than 2."""
        if self.count < 2:
            return None
        spread = self.count * self._squares - self._sum * self._sum
        return math.isqrt(spread * self.count // (self.count - 1)) / (self.count << _SHIFT)

    @property
    def std_error(self) -> float | None:
        return std_error(self.std, self.count)


def exact_mean(values: list[float]) -> float:
    """The mean of finite numbers, also where their sum is more than a float can hold."""
    exact = ExactMean()
    for value in values:
        exact.add(value)
    return exact.mean


class _Lengths:
    """Tokens of the turns whose length is known."""

    def __init__(self) -> None:
        self.turns = self.tokens = 0

    def add(self, length: int) -> None:
        self.turns += 1
        self.tokens += length

    def report(self, name: str, turns: int) -> dict[str, float]:
        values: dict[str, float] = {}
        if self.turns:
            values[f"{name}_per_turn"] = self.tokens / self.turns
        if self.turns or not turns:
            values[f"total_{name}"] = self.tokens
        if self.turns < turns:
            values[f"{name}_per_turn:count"] = self.turns
        return values


class _Scope:
    """The numbers of all trajectories, or of those with one tag."""

    def __init__(self) -> None:
        self.groups: dict[int, ExactMean] = defaultdict(ExactMean)
        self.reward = ExactMean()
        self.metrics: dict[str, ExactMean] = defaultdict(ExactMean)
        self.stops: Counter[str] = Counter()
        self.ac_tokens, self.ob_tokens = _Lengths(), _Lengths()
        self.ok = self.failed = self.turns = 0

    def add(self, summary: RolloutSummary, metrics: dict[str, float]) -> None:
        group = self.groups[summary.group_idx]
        if summary.status is Status.ERROR:
            self.failed += 1
            return
        self.ok += 1
        self.turns += len(summary.steps)
        for step in summary.steps:
            if step.ac_len is not None:
                self.ac_tokens.add(step.ac_len)
            if step.ob_len is not None:
                self.ob_tokens.add(step.ob_len)
        if summary.stop_reason:
            self.stops[summary.stop_reason] += 1
        if summary.total_reward is not None and math.isfinite(summary.total_reward):
            self.reward.add(summary.total_reward)
            group.add(summary.total_reward)
        for key, value in metrics.items():
            self.metrics[key].add(value)

    def report(self) -> dict[str, float]:
        values: dict[str, float] = {}
        for key, mean in sorted(self.metrics.items()):
            values[key] = mean.mean
            if mean.count < self.ok:
                values[f"{key}:count"] = mean.count
        # After the environment's own: what it calls reward/total must not replace what is.
        values |= {"rollouts/ok": self.ok, "rollouts/failed": self.failed}
        if self.reward.count:
            values["reward/total"] = self.reward.mean
            values["reward/min"], values["reward/max"] = self.reward.low, self.reward.high
        for name, spread in (("std", self.reward.std), ("std_error", self.reward.std_error)):
            if spread is not None:
                values[f"reward/{name}"] = spread
        if self.ok > self.reward.count:
            values["reward/total:count"] = self.reward.count
        values |= {"total_episodes": self.ok, "total_turns": self.turns}
        if self.turns:
            values["turns_per_episode"] = self.turns / self.ok
        for name, lengths in (("ac_tokens", self.ac_tokens), ("ob_tokens", self.ob_tokens)):
            values |= lengths.report(name, self.turns)
        for reason, count in sorted(self.stops.items()):
            values[f"stop/{reason}"] = count / self.ok
        return values | self._by_group()

    def _by_group(self) -> dict[str, float]:
        graded = [group for group in self.groups.values() if group.count]
        if not graded:
            return {}
        constant = [group for group in graded if group.low == group.high]
        good = sum(group.mean >= _GOOD_FROM for group in constant)
        return {
            "by_group/frac_mixed": 1 - len(constant) / len(graded),
            "by_group/frac_all_good": good / len(graded),
            "by_group/frac_all_bad": (len(constant) - good) / len(graded),
        }


class RolloutStats:
    def __init__(self) -> None:
        self._all = _Scope()
        self._tags: dict[str, _Scope] = defaultdict(_Scope)
        self._expected = 0
        self._rollouts = 0

    def expect(self, trajectories: int) -> None:
        """So many trajectories were asked for, whatever becomes of them."""
        self._expected += trajectories

    def add(self, summary: RolloutSummary) -> None:
        self._rollouts += 1
        metrics = _trajectory_metrics(summary)
        for scope in (self._all, *(self._tags[tag] for tag in dict.fromkeys(summary.tags))):
            scope.add(summary, metrics)

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """`env/all/...`, and `env/<tag>/...` for each tag once some tag covers only a part."""
        expected = max(self._expected, self._rollouts)
        values = {f"{prefix}env/all/{key}": value for key, value in self._all.report().items()}
        values[f"{prefix}env/all/rollouts/expected"] = expected
        values[f"{prefix}env/all/rollouts/missing"] = expected - self._rollouts
        if f"{prefix}env/all/ac_tokens_per_turn" in values:  # documented without the prefix
            values[f"{prefix}ac_tokens_per_turn"] = values.pop(f"{prefix}env/all/ac_tokens_per_turn")
        if any(scope.ok + scope.failed < self._rollouts for scope in self._tags.values()):
            for tag, scope in sorted(self._tags.items()):
                if tag == "all":
                    continue  # the name of the whole
                values |= {f"{prefix}env/{tag}/{key}": value for key, value in scope.report().items()}
        return values


def _trajectory_metrics(summary: RolloutSummary) -> dict[str, float]:
    """Each metric of a trajectory once: its own, or the mean over the steps that emitted it."""
    sums: dict[str, list[float]] = defaultdict(list)
    for step in summary.steps:
        for key, value in step.metrics.items():
            sums[key] += _numbers(value)
    own = {key: values for key, value in summary.trajectory_metrics.items() if (values := _numbers(value))}
    merged = {**sums, **own}
    return {key: exact_mean(values) for key, values in merged.items() if values and not _is_stop(key)}


def _numbers(value: Any) -> list[float]:
    plain = to_plain(value)
    return [float(plain)] if isinstance(plain, int | float) else []


def _is_stop(key: str) -> bool:
    return key.startswith(
        "stop/"
    )  # the reason is a value of its own; a one-hot metric would always average 1
