"""Looks at the metrics of each iteration and says when a run goes wrong.

A condition raises one alert when it begins to hold, and can raise it again after it has stopped holding.
Nothing is kept beside the metrics themselves: after a resume the lines that are there are looked at again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from statistics import fmean, median
from typing import Any, NamedTuple

from rollbook.rl.limits import Limits

Metrics = Mapping[str, float]

K3_LIMIT, K3_LIMIT_ONCE, K3_ITERATIONS = 0.01, 0.1, 3
FAR_TOKENS_LIMIT = 0.001  # share of tokens whose logprobs differ by more than 5
FAILED_LIMIT = 0.25
ALL_BAD_LIMIT = 0.9
TRUNCATED_LIMIT = 0.25
ENTROPY_LIMIT, ENTROPY_PART = 0.02, 0.1
DUPLICATES_LIMIT = 0.5  # beyond what the probabilities of the rollouts explain
GRADIENT_FACTOR = 20
FALLEN, LOST = 0.95, 0.5  # parts of the best mean reward
WINDOW = 10


class Finding(NamedTuple):
    title: str
    text: str


class Watch:
    def __init__(self, vocabulary: int, limits: Limits) -> None:
        self._limits = limits
        self._most_entropy = math.log(vocabulary)
        self._seen: list[Metrics] = []
        self._active: set[str] = set()
        self._excess: list[float] = []  # of k3 over the noise floor measured last
        self._noise_floor = 0.0
        self._first: Metrics | None = None
        self._first_entropy: float | None = None
        self._reward = self._best_reward = -math.inf  # means over a window

    def look(self, line: Mapping[str, Any]) -> list[Finding]:
        """What is wrong since this iteration; `line` is what was logged, or a line of metrics.jsonl."""
        metrics = _numbers(line)
        self._seen.append(metrics)
        del self._seen[: -10 * WINDOW]
        if self._first is None:
            self._first = metrics
        if self._first_entropy is None:  # the first iteration may have trained nothing
            self._first_entropy = metrics.get("entropy")
        self._note_mismatch(metrics)
        self._note_reward()
        holding = {found.title: found for found in self._conditions(metrics)}
        raised = [found for title, found in holding.items() if title not in self._active]
        self._active = set(holding)
        return raised

    def _note_mismatch(self, metrics: Metrics) -> None:
        """An iteration in which nothing was trained says nothing about it."""
        self._noise_floor = metrics.get("noise_floor/k3", self._noise_floor)
        if "kl_sample_train_v3" in metrics:
            excess = metrics["kl_sample_train_v3"] - self._noise_floor
            self._excess = [*self._excess, excess][-K3_ITERATIONS:]

    def _note_reward(self) -> None:
        recent = self._values("env/all/reward/total", WINDOW)
        if len(recent) == WINDOW:
            self._reward = fmean(recent)
            self._best_reward = max(self._best_reward, self._reward)

    def _reward_is_below(self, part: float) -> bool:
        """Whether the mean of the newest rewards is less than this part of the best mean so far."""
        return self._reward < self._best_reward - (1 - part) * abs(self._best_reward)

    def _conditions(self, now: Metrics) -> Iterator[Finding]:
        yield from self._mismatch(now)
        yield from self._sampling(now)
        yield from self._learning(now)
        if now is self._first:
            yield from self._first_step(now)

    def _mismatch(self, now: Metrics) -> Iterator[Finding]:
        excess = self._excess
        lasting = len(excess) == K3_ITERATIONS and min(excess) > K3_LIMIT
        if lasting or (excess and excess[-1] > K3_LIMIT_ONCE):
            yield Finding(
                "sampler and trainer disagree",
                f"kl_sample_train_v3 is {excess[-1]:.3g} above the trainer's own noise floor; the weights "
                "that sampled are not those that train, or the temperature is not the same",
            )
        if (share := now.get("logprob_diff_over_5", 0.0)) > FAR_TOKENS_LIMIT:
            yield Finding(
                "tokens with very different probabilities",
                f"on {share:.2%} of the tokens of the first optimiser step the logprobs of sampler and "
                "trainer differ by over 5",
            )

    def _sampling(self, now: Metrics) -> Iterator[Finding]:
        failed, expected = (now.get(f"env/all/rollouts/{key}", 0.0) for key in ("failed", "expected"))
        if failed > FAILED_LIMIT * expected:
            yield Finding(
                "many rollouts fail",
                f"{failed:.0f} of {expected:.0f} rollouts have no reward, because an error or a time-out "
                "ended them; the `error` of each is in the rollout summaries",
            )
        if (bad := now.get("env/all/by_group/frac_all_bad", 0.0)) > ALL_BAD_LIMIT:
            yield Finding(
                "almost every group fails as a whole",
                f"{bad:.0%} of the groups have equal rewards below 0.5; take easier tasks, larger groups, "
                "or fine-tune on a few answers first",
            )
        if (share := self._many_cut("truncated/reply")) is not None:
            yield Finding(
                "many replies are cut off",
                f"in {share:.0%} of the rollouts a reply was cut off; {self._limits.for_longer_replies}",
            )
        if (share := self._many_cut("truncated/episode")) is not None:
            yield Finding(
                "many episodes run out of room",
                f"{share:.0%} of the rollouts ended for lack of it; {self._limits.for_longer_episodes}",
            )
        copies = now.get("duplicates/share", 0.0)
        if copies - now.get("duplicates/expected", copies) > DUPLICATES_LIMIT:
            yield Finding(
                "rollouts are copies of each other",
                f"{copies:.0%} of the rollouts equal another one of their group, where their probabilities "
                f"explain {now['duplicates/expected']:.0%}; do they share a seed?",
            )
        entropy, first = now.get("entropy"), self._first_entropy
        if entropy is None or first is None:
            return
        if (entropy < ENTROPY_LIMIT or entropy < ENTROPY_PART * first) and self._reward_is_below(FALLEN):
            yield Finding(
                "entropy has collapsed while the reward falls",
                f"entropy is {entropy:.3g}, it was {first:.3g} at the start; lower learning_rate",
            )

    def _many_cut(self, key: str) -> float | None:
        """The share of the rollouts that a limit cuts, where it is large or grows fast."""
        shares = self._values(key, WINDOW)
        tripled = len(shares) == WINDOW and shares[-1] > 3 * shares[0] and shares[-1] > 0.05
        return shares[-1] if shares and (shares[-1] > TRUNCATED_LIMIT or tripled) else None

    def _learning(self, now: Metrics) -> Iterator[Finding]:
        if now.get("optim/applied", 1.0) < 1.0:
            yield Finding(
                "a step was not finite", "the loss or its gradients were not finite; the step was skipped"
            )
        norms = self._values("optim/grad_norm", 2 * WINDOW)
        if len(norms) > WINDOW // 2 and norms[-1] > GRADIENT_FACTOR * median(norms[:-1]):
            yield Finding(
                "the gradient is far larger than before",
                f"grad_norm is {norms[-1]:.3g}, its median before was {median(norms[:-1]):.3g}",
            )
        if self._best_reward > 0 and self._reward_is_below(LOST):
            yield Finding(
                "the reward has fallen to less than half of its best",
                f"mean over {WINDOW} iterations: {self._reward:.3g}, best {self._best_reward:.3g}; lower "
                "learning_rate, or go back to an earlier checkpoint",
            )

    def _first_step(self, now: Metrics) -> Iterator[Finding]:
        problems = []
        if now.get("optim/applied", 1.0) < 1.0:
            problems.append("the loss is not finite")
        k3 = self._excess[-1] if self._excess else 0.0
        if abs(now.get("kl_sample_train_v1", 0.0)) > 0.05 or k3 > K3_LIMIT:
            problems.append("sampler and trainer give different logprobs to the same tokens")
        if not 0 < now.get("entropy", 1e-9) <= self._most_entropy:
            problems.append(f"entropy {now['entropy']:.3g} is not between 0 and log(vocabulary)")
        if now.get("groups/trained", 1) == 0:
            problems.append(f"nothing was trained{_untrained(now)}")
        if problems:
            yield Finding("the first step does not look right", "; ".join(problems))

    def _values(self, key: str, most: int) -> list[float]:
        return [metrics[key] for metrics in self._seen[-most:] if key in metrics]


def _untrained(now: Metrics) -> str:
    """What became of the groups of an iteration that trained none of them."""
    whys = {
        "constant": "have equal rewards",
        "lone": "have one rollout left",
        "truncated": "were cut off",
        "failed": "failed",
    }
    found = [f"{now[key]:.0f} {why}" for name, why in whys.items() if now.get(key := f"groups/{name}", 0) > 0]
    return f": of the groups, {', '.join(found)}" if found else ""


def _numbers(line: Mapping[str, Any]) -> Metrics:
    """The finite numbers of a line; in a file the others are null."""
    return {
        key: float(value)
        for key, value in line.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
