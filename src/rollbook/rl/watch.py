"""Looks at the metrics of each iteration and says when a run goes wrong.

A condition raises one alert when it begins to hold, and can raise it again after it has stopped holding.
Nothing is kept beside the metrics themselves: after a resume the lines that are there are looked at again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from statistics import fmean, median
from typing import NamedTuple

Metrics = Mapping[str, float]

K3_LIMIT, K3_LIMIT_ONCE, K3_ITERATIONS = 0.01, 0.1, 3
FAR_TOKENS_LIMIT = 0.001  # share of tokens whose logprobs differ by more than 5
ALL_BAD_LIMIT = 0.9
TRUNCATED_LIMIT = 0.25
ENTROPY_LIMIT, ENTROPY_PART = 0.02, 0.1
DUPLICATES_LIMIT = 0.95
GRADIENT_FACTOR = 20
WINDOW = 10


class Finding(NamedTuple):
    title: str
    text: str


class Watch:
    def __init__(self, vocabulary: int) -> None:
        self._most_entropy = math.log(vocabulary)
        self._seen: list[Metrics] = []
        self._active: set[str] = set()
        self._excess: list[float] = []  # of k3 over the noise floor measured last
        self._noise_floor = 0.0

    def look(self, metrics: Metrics) -> list[Finding]:
        """What is wrong since this iteration."""
        self._seen.append(metrics)
        del self._seen[: -10 * WINDOW]
        self._noise_floor = metrics.get("noise_floor/k3", self._noise_floor)
        self._excess = [*self._excess, metrics.get("kl_sample_train_v3", 0.0) - self._noise_floor][
            -K3_ITERATIONS:
        ]
        self._note_reward(metrics)
        holding = {found.title: found for found in self._conditions(metrics)}
        raised = [found for title, found in holding.items() if title not in self._active]
        self._active = set(holding)
        return raised

    def _note_reward(self, metrics: Metrics) -> None:
        if len(self._seen) == 1:
            self._first = metrics
            self._best_reward = -math.inf
        recent = self._values("env/all/reward/total", WINDOW)
        if len(recent) == WINDOW:
            self._best_reward = max(self._best_reward, fmean(recent))

    def _conditions(self, now: Metrics) -> Iterator[Finding]:
        yield from self._mismatch(now)
        yield from self._sampling(now)
        yield from self._learning(now)
        if now is self._first:
            yield from self._first_step(now)

    def _mismatch(self, now: Metrics) -> Iterator[Finding]:
        excess = self._excess
        lasting = len(excess) == K3_ITERATIONS and min(excess) > K3_LIMIT
        if lasting or excess[-1] > K3_LIMIT_ONCE:
            yield Finding(
                "sampler and trainer disagree",
                f"kl_sample_train_v3 is {excess[-1]:.3g} above the trainer's own noise floor; the weights "
                "that sampled are not those that train, or the temperature is not the same",
            )
        if (share := now.get("logprob_diff_over_5", 0.0)) > FAR_TOKENS_LIMIT:
            yield Finding(
                "tokens with very different probabilities",
                f"on {share:.2%} of the trained tokens the logprobs of sampler and trainer differ by over 5",
            )

    def _sampling(self, now: Metrics) -> Iterator[Finding]:
        if (bad := now.get("env/all/by_group/frac_all_bad", 0.0)) > ALL_BAD_LIMIT:
            yield Finding(
                "almost every group fails as a whole",
                f"{bad:.0%} of the groups have equal rewards below 0.5; take easier tasks, larger groups, "
                "or fine-tune on a few answers first",
            )
        truncated = self._values("truncated/share", WINDOW)
        if truncated:
            tripled = len(truncated) == WINDOW and truncated[-1] > 3 * truncated[0] and truncated[-1] > 0.05
            if truncated[-1] > TRUNCATED_LIMIT or tripled:
                yield Finding(
                    "many replies are cut off",
                    f"{truncated[-1]:.0%} of the rollouts reached the token limit; raise "
                    "sampler.max_tokens, or set truncated: mask",
                )
        reward_falls = self._falls("env/all/reward/total")
        entropy, first = now.get("entropy"), self._first.get("entropy")
        if entropy is None or first is None or not reward_falls:
            return
        if entropy < ENTROPY_LIMIT or entropy < ENTROPY_PART * first:
            yield Finding(
                "entropy has collapsed while the reward falls",
                f"entropy is {entropy:.3g}, it was {first:.3g} at the start; lower learning_rate",
            )

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
        recent = self._values("env/all/reward/total", WINDOW)
        if self._best_reward > 0 and len(recent) == WINDOW and fmean(recent) < self._best_reward / 2:
            yield Finding(
                "the reward has fallen to less than half of its best",
                f"mean over {WINDOW} iterations: {fmean(recent):.3g}, best {self._best_reward:.3g}; lower "
                "learning_rate, or go back to an earlier checkpoint",
            )

    def _first_step(self, now: Metrics) -> Iterator[Finding]:
        problems = []
        if not math.isfinite(now.get("optim/loss", 0.0)):
            problems.append("the loss is not finite")
        if abs(now.get("kl_sample_train_v1", 0.0)) > 0.05 or self._excess[-1] > K3_LIMIT:
            problems.append("sampler and trainer give different logprobs to the same tokens")
        if not 0 < now.get("entropy", 1e-9) <= self._most_entropy:
            problems.append(f"entropy {now['entropy']:.3g} is not between 0 and log(vocabulary)")
        if now.get("duplicates/share", 0.0) > DUPLICATES_LIMIT:
            problems.append("almost every rollout equals another one of its group: do they share a seed?")
        if now.get("groups/trained", 1) == 0:
            problems.append("no group has different rewards, so nothing was trained")
        if problems:
            yield Finding("the first step does not look right", "; ".join(problems))

    def _values(self, key: str, most: int) -> list[float]:
        return [metrics[key] for metrics in self._seen[-most:] if key in metrics]

    def _falls(self, key: str) -> bool:
        values = self._values(key, WINDOW)
        half = WINDOW // 2
        return len(values) == WINDOW and fmean(values[half:]) < fmean(values[:half])
