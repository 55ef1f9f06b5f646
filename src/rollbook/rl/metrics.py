"""The metrics of an iteration beside those of its rollouts (`records/rollout_stats`).

Every key, its formula and the rollouts or tokens that it is about are in docs/metrics.md.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rollbook.records.iterations import Fate
from rollbook.rl.groups import VERDICTS, Group, Selection, cuts_of, duplicates
from rollbook.train.engine import StepOutput
from rollbook.train.metrics import joined

# What the engine measures about agreement and entropy keeps its name; facts of the loss get a prefix.
_OF_AGREEMENT = ("entropy", "kl_sample_train_", "logprob_diff")


class Clock:
    """Seconds per stage of an iteration, as `time/<stage>`."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - began

    def add(self, stage: str, seconds: float) -> None:
        """Seconds that were measured elsewhere; a stage that took none is not there."""
        if seconds:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds

    def without(self, stage: str) -> float:
        """Seconds since the beginning but for those of one stage."""
        return time.perf_counter() - self._began - self.seconds.get(stage, 0.0)

    def metrics(self) -> dict[str, float]:
        values = {f"time/{stage}": seconds for stage, seconds in self.seconds.items()}
        return values | {"time/total": time.perf_counter() - self._began}


def of_sampling(groups: Sequence[Group], selection: Selection, max_tokens: int) -> dict[str, float]:
    """What was sampled, with at most `max_tokens` per reply, and what of it is trained."""
    episodes = [episode for group in groups for episode in group.episodes if episode is not None]
    sampled = sum(len(turn.token_ids or ()) for episode in episodes for turn in episode.turns)
    cuts, copies = [cuts_of(episode, max_tokens) for episode in episodes], duplicates(groups)
    truncated, verdicts = sum(map(any, cuts)), Counter(selection.verdicts.values())
    values: dict[str, float] = {
        "groups/drawn": len(groups),
        **{f"groups/{verdict}": verdicts[verdict] for verdict in VERDICTS},
        "rollouts/trained": selection.count(Fate.TRAINED),
        "truncated/count": truncated,
        "duplicates/share": copies.share,
        "duplicates/expected": copies.expected,
        "tokens/sampled": sampled,
        "tokens/trained": sum(int(example.trained_T[1:].sum()) for example in selection.examples),
    }
    if episodes:
        values["truncated/share"] = truncated / len(episodes)
        values["truncated/reply"] = sum(cut.reply for cut in cuts) / len(episodes)
        values["truncated/episode"] = sum(cut.episode for cut in cuts) / len(episodes)
    return values


def of_training(steps: Sequence[StepOutput], learning_rate: float) -> dict[str, float]:
    """How far trainer and sampler agree, of the tokens of the first optimiser step, where the weights are
    still those that sampled; what the loss did with the tokens of all steps; norms of all steps."""
    values: dict[str, float] = {"optim/lr": learning_rate, "optim/steps": len(steps)}
    if not steps:
        return values
    first, all_steps = steps[0].means, joined([step.sums for step in steps]).means()
    for name in all_steps:
        value = first[name] if _is_agreement(name) else all_steps[name]
        values[name if name.startswith(_OF_AGREEMENT) else f"loss/{name}"] = value
    values["optim/loss"] = sum(step.loss for step in steps) / len(steps)
    values["optim/grad_norm"] = max(step.grad_norm for step in steps)
    values["optim/applied"] = sum(step.applied for step in steps) / len(steps)
    return values


def _is_agreement(name: str) -> bool:
    """Whether it says how far the weights that sampled are from the trainer's: the sample size that is left
    of it, too."""
    return name == "ess" or name.startswith(_OF_AGREEMENT)
