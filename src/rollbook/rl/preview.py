"""`rollbook rl --dry-run`: what an iteration would look like and cost, before one is run.

A few groups are sampled with the real sampler and environments, and one training step is taken with a rate of
0. Nothing is recorded and nothing is changed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np

from rollbook.policies.chat_format import ChatFormat
from rollbook.records import logtree
from rollbook.records.rollout_stats import ExactMean
from rollbook.rl.advantages import is_constant
from rollbook.rl.groups import Group, cuts_of, select
from rollbook.rl.limits import Limits
from rollbook.rl.open_groups import GroupPlan
from rollbook.rl.opening import Log, Trainer, open_sampler, open_trainer
from rollbook.rl.player import Played
from rollbook.rl.schedule import Schedule
from rollbook.rl.settings import RlSettings
from rollbook.rl.start import Start
from rollbook.rl.steps import plan_steps
from rollbook.rl.tasks import TaskPool, read_pools
from rollbook.rl.train import plans_of
from rollbook.samplers.selftest import longest_sequence
from rollbook.train.memory import GRADIENT_BYTES, MOMENT_BYTES, Peak, bytes_per_trained, free_bytes, gib
from rollbook.train.processes import Processes

GROUPS = 16
FEW_MIXED, MANY_CUT = 0.2, 0.25


class RolloutPreview(msgspec.Struct):
    reward: float | None
    finish_reason: str | None
    replies: list[dict[str, Any]]  # what came after the prompt


class EnvironmentPreview(msgspec.Struct):
    """One environment: how its groups went, and the first of them in full."""

    name: str
    groups: int
    mixed: float  # the share of groups whose rewards differ
    cut_replies: float  # the share of rollouts of which a reply reached max_tokens
    cut_episodes: float  # and of those that ran out of max_length or max_episode_tokens
    failed: int
    reward: float | None
    reward_std_error: float | None
    prompt: str  # as the model sees it
    prompt_tokens: int
    group: list[RolloutPreview]


class MemoryPreview(msgspec.Struct):
    """Bytes; activations are measured where they can be, and `free` is from before the model was loaded."""

    weights: int
    optimizer: int
    cache: int
    activations: int | None
    free: int

    @property
    def total(self) -> int:
        return self.weights + self.optimizer + self.cache + (self.activations or 0)


class Preview(msgspec.Struct):
    """What `--dry-run` found."""

    environments: list[EnvironmentPreview]
    groups: int
    mixed: float
    reward: float | None
    reward_std_error: float | None
    failed: int
    max_length: int  # tokens of a sequence, as set or as chosen
    slots: int  # sequences that are sampled at once
    seconds_sample: float  # about, for a whole iteration
    seconds_train: float
    memory: MemoryPreview
    advice: list[str]


class _NoLog:
    """Takes rollouts and keeps nothing."""

    node = logtree.NOWHERE

    @contextmanager
    def group(self, *_: object, **__: object) -> Iterator[_NoLog]:
        yield self

    def add(self, *_: object) -> None:
        return None

    def fail(self, *_: object) -> None:
        return None


def preview(settings: RlSettings, log: Log) -> Preview:
    processes = Processes()
    free = free_bytes(processes.device)
    tasks = read_pools(settings, log)
    settings, trainer = open_trainer(Start(settings, False), processes, log)
    with open_sampler(settings, trainer, tasks, log) as (settings, policy, player):
        plans = _plans(settings, tasks.training)
        log(f"sampling {GROUPS} groups of {settings.group_size} ...")
        began = time.perf_counter()
        played = player.groups(
            plans,
            policy,
            _NoLog(),
            version=0,
            rollouts=GROUPS * settings.group_size,
            stall_after_s=60.0,
            on_stall=_log_stall(log),
        )
        sample_s = time.perf_counter() - began
        log("training on them with a rate of 0 ...")
        with Peak(processes.device) as peak:
            train_s = _train(trainer, settings, played.groups)
        scale = settings.groups_drawn / GROUPS
        environments = [
            _environment(pool, plans, played.groups, policy.chat_format) for pool in tasks.training
        ]
        rewards = _all_rewards(played.groups)
        limits = Limits.of(settings.sampler, longest_sequence(trainer.model))
        found = Preview(
            environments=[environment for environment in environments if environment is not None],
            groups=GROUPS,
            mixed=_share_of_mixed(played.groups),
            reward=rewards.mean if rewards.count else None,
            reward_std_error=rewards.std_error,
            failed=played.failed,
            max_length=limits.max_length,
            slots=settings.sampler.slots or 0,
            seconds_sample=sample_s * scale,
            seconds_train=train_s * scale,
            memory=_memory(settings, trainer, policy.cache_bytes, peak.bytes, free),
            advice=[],
        )
        found.advice = _advice(found, settings, limits, played)
        return found


def _log_stall(log: Log) -> Any:
    return lambda stall: log(str(stall))


def _plans(settings: RlSettings, pools: Sequence[TaskPool]) -> list[GroupPlan]:
    weights, sizes = [pool.settings.weight for pool in pools], [len(pool) for pool in pools]
    return plans_of(settings, pools, Schedule(settings.seed, weights, sizes, GROUPS), 0)


def _train(trainer: Trainer, settings: RlSettings, groups: list[Group]) -> float:
    """Seconds of one training step over everything that would be trained."""
    selection = select(
        groups,
        split="train",
        iteration=0,
        at_most=len(groups),
        advantage=settings.advantage,
        truncated=settings.truncated,
    )
    if not selection.examples:
        return 0.0
    began = time.perf_counter()
    (share,) = plan_steps(trainer, settings, selection.examples, 0, processes=1)
    for batches in share.steps:
        trainer.engine.step(batches, settings.loss, 0.0)
    return time.perf_counter() - began


def _environment(
    pool: TaskPool, plans: Sequence[GroupPlan], groups: Sequence[Group], chat_format: ChatFormat
) -> EnvironmentPreview | None:
    """None where none of the few groups is of this environment."""
    name = pool.settings.label
    own = [(plan, group) for plan, group in zip(plans, groups, strict=True) if plan.tags == (name,)]
    if not own:
        return None
    (plan, first), some = own[0], [group for _, group in own]
    prompt = _first_prompt(first) or chat_format.prompt(plan.task.messages, plan.task.tools)
    rollouts = [episode for group in some for episode in group.episodes]
    cuts = [cuts_of(episode, pool.max_tokens) for episode in rollouts if episode is not None]
    rewards = _all_rewards(some)
    return EnvironmentPreview(
        name=name,
        groups=len(some),
        mixed=_share_of_mixed(some),
        cut_replies=sum(cut.reply for cut in cuts) / max(1, len(cuts)),
        cut_episodes=sum(cut.episode for cut in cuts) / max(1, len(cuts)),
        failed=len(rollouts) - len(cuts),
        reward=rewards.mean if rewards.count else None,
        reward_std_error=rewards.std_error,
        prompt=chat_format.tokenizer.decode(prompt),
        prompt_tokens=len(prompt),
        group=_rollouts(first),
    )


def _first_prompt(group: Group) -> list[int] | None:
    """The tokens that were really shown: an environment may open with other messages, and with tools."""
    turns = (episode.turns[0] for episode in group.episodes if episode is not None and episode.turns)
    return next((turn.prompt_token_ids for turn in turns), None)


def _rollouts(group: Group) -> list[RolloutPreview]:
    return [
        RolloutPreview(
            episode.reward,
            episode.turns[-1].finish_reason if episode.turns else None,
            [dict(message) for message in episode.messages],
        )
        for episode in group.episodes
        if episode is not None
    ]


def _rewards(group: Group) -> list[float]:
    rewards = (episode.reward for episode in group.episodes if episode is not None)
    return [reward for reward in rewards if reward is not None]


def _share_of_mixed(groups: Sequence[Group]) -> float:
    return sum(not is_constant(np.array(_rewards(group))) for group in groups) / len(groups)


def _all_rewards(groups: Sequence[Group]) -> ExactMean:
    rewards = ExactMean()
    for group in groups:
        for reward in _rewards(group):
            rewards.add(reward)
    return rewards


def _memory(settings: RlSettings, trainer: Trainer, cache: int, peak: int | None, free: int) -> MemoryPreview:
    trained = sum(weight.numel() for weight in trainer.optimizer.weights)
    taken = trained * (MOMENT_BYTES + GRADIENT_BYTES)  # in the step, beside what the batch needs
    return MemoryPreview(
        weights=sum(weight.numel() * weight.element_size() for weight in trainer.model.model.parameters()),
        optimizer=trained * bytes_per_trained(settings.model),
        cache=cache,
        activations=None if peak is None else max(0, peak - taken),
        free=free,
    )


def _advice(found: Preview, settings: RlSettings, limits: Limits, played: Played) -> list[str]:
    return [
        *_of_unseen(found, settings),
        *_of_failures(played),
        *(text for environment in found.environments for text in _of_mixed(environment)),
        *_of_length(found, limits),
        *_of_memory(found.memory),
    ]


def _of_unseen(found: Preview, settings: RlSettings) -> Iterator[str]:
    seen = {environment.name for environment in found.environments}
    for environment in settings.environments:
        if environment.label not in seen:
            yield f"{environment.label}: none of the {found.groups} groups is of it; its weight is small"


def _of_failures(played: Played) -> Iterator[str]:
    if played.errors:
        yield played.why_failed


def _of_mixed(environment: EnvironmentPreview) -> Iterator[str]:
    if environment.mixed >= FEW_MIXED or environment.reward is None:
        return
    what = (
        "take easier tasks, fine-tune on a few answers first, or raise group_size"
        if environment.reward < 0.5
        else "take harder tasks, or raise sampler.temperature"
    )
    yield (
        f"{environment.name}: only {environment.mixed:.0%} of the groups have different rewards, and only "
        f"they teach: {what}"
    )


def _of_length(found: Preview, limits: Limits) -> Iterator[str]:
    for environment in found.environments:
        if environment.cut_replies > MANY_CUT:
            yield (
                f"{environment.name}: in {environment.cut_replies:.0%} of the rollouts a reply was cut off; "
                f"{limits.for_longer_replies}"
            )
        if environment.cut_episodes > MANY_CUT:
            yield (
                f"{environment.name}: {environment.cut_episodes:.0%} of the rollouts ran out of room; "
                f"{limits.for_longer_episodes}"
            )


def _of_memory(memory: MemoryPreview) -> Iterator[str]:
    if memory.total > memory.free:
        yield (
            f"an iteration needs about {gib(memory.total)}, and {gib(memory.free)} were free: lower "
            "micro_batch_tokens (activations), sampler.slots (keys and values), or set model.lora (optimiser)"
        )
