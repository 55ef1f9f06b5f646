"""`rollbook rl --dry-run`: what an iteration would look like and cost, before one is run.

A few groups are sampled with the real sampler and environments, and one training step is taken with a rate of
0. Nothing is recorded and nothing is changed.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec
import numpy as np
import torch

from rollbook.rl.advantages import is_constant
from rollbook.rl.console import conversation_of
from rollbook.rl.groups import Group, select
from rollbook.rl.opening import (
    Log,
    Start,
    Trainer,
    decide_length,
    open_policy,
    open_trainer,
)
from rollbook.rl.player import GroupPlan, Player
from rollbook.rl.schedule import Schedule
from rollbook.rl.settings import RlSettings
from rollbook.rl.steps import plan_steps
from rollbook.rl.tasks import TaskPool, open_pools
from rollbook.rl.train import plans_of
from rollbook.train.processes import Processes

GROUPS = 16
FEW_MIXED = 0.2


class RolloutPreview(msgspec.Struct):
    reward: float | None
    finish_reason: str | None
    messages: list[dict[str, Any]]


class Preview(msgspec.Struct):
    """What `--dry-run` found. Bytes of what is allocated once, and the most that was in use."""

    prompt: str  # as the model sees it
    prompt_tokens: int
    group: list[RolloutPreview]
    groups: int
    mixed: float  # the share of groups whose rewards differ
    failed: int
    reward: float | None
    seconds_sample: float  # about, for a whole iteration
    seconds_train: float
    bytes_weights: int
    bytes_optimizer: int
    bytes_cache: int
    bytes_used: int
    bytes_free: int
    advice: list[str]


class _NoLog:
    """Takes rollouts and keeps nothing."""

    @contextmanager
    def group(self, *_: object, **__: object) -> Iterator[_NoLog]:
        yield self

    def add(self, *_: object) -> None:
        return None

    def fail(self, *_: object) -> None:
        return None


def preview(settings: RlSettings, log: Log) -> Preview:
    with ExitStack() as opened:
        settings, trainer = open_trainer(Start(settings, False, None, None), Processes(), log)
        pools, _ = open_pools(settings, log)
        settings = decide_length(settings, trainer.model, pools)
        policy = open_policy(settings, trainer.model)
        player = opened.enter_context(Player(settings.retry, settings.episode_timeout_s))
        opened.callback(player.close_all, [policy, *(pool.source for pool in pools)])
        groups = min(GROUPS, settings.groups_drawn)
        plans = _plans(settings, pools)[:groups]
        log(f"sampling {groups} groups of {settings.group_size} ...")
        began = time.perf_counter()
        played = player.groups(plans, policy, _NoLog(), version=0, stall_after_s=60.0)
        sample_s = time.perf_counter() - began
        log("training on them with a rate of 0 ...")
        train_s, trained = _train(trainer, settings, played.groups)
        scale = settings.groups_drawn / groups
        format_ = policy.chat_format
        prompt = format_.prompt(plans[0].task.messages, plans[0].task.tools)
        found = Preview(
            prompt=format_.tokenizer.decode(prompt),
            prompt_tokens=len(prompt),
            group=_rollouts(played.groups[0]),
            groups=groups,
            mixed=_share_of_mixed(played.groups),
            failed=sum(episode is None for group in played.groups for episode in group.episodes),
            reward=_mean_reward(played.groups),
            seconds_sample=sample_s * scale,
            seconds_train=train_s * scale if trained else 0.0,
            bytes_weights=_bytes(trainer.model.model.parameters()),
            bytes_optimizer=_bytes(t for state in trainer.optimizer.tensors() for t in state.values()),
            bytes_cache=policy.cache_bytes,
            bytes_used=_most_used(trainer.processes.device),
            bytes_free=_free(trainer.processes.device),
            advice=[],
        )
        found.advice = _advice(found, settings)
        return found


def _plans(settings: RlSettings, pools: list[TaskPool]) -> list[GroupPlan]:
    weights, sizes = [pool.settings.weight for pool in pools], [len(pool) for pool in pools]
    return plans_of(settings, pools, Schedule(settings.seed, weights, sizes, settings.groups_drawn), 0)


def _train(trainer: Trainer, settings: RlSettings, groups: list[Group]) -> tuple[float, int]:
    """Seconds of one training step over everything that would be trained, and how many rollouts that is."""
    selection = select(
        groups,
        split="train",
        iteration=0,
        at_most=len(groups),
        advantage=settings.advantage,
        truncated=settings.truncated,
    )
    if not selection.examples:
        return 0.0, 0
    began = time.perf_counter()
    (share,) = plan_steps(trainer, settings, selection.examples, 0, processes=1)
    for batches in share.steps:
        trainer.engine.step(batches, settings.loss, 0.0)
    return time.perf_counter() - began, len(selection.examples)


def _rollouts(group: Group) -> list[RolloutPreview]:
    return [
        RolloutPreview(
            episode.reward,
            episode.turns[-1].finish_reason if episode.turns else None,
            [dict(message) for message in conversation_of(episode)],
        )
        for episode in group.episodes
        if episode is not None
    ]


def _rewards(group: Group) -> list[float]:
    rewards = (episode.reward for episode in group.episodes if episode is not None)
    return [reward for reward in rewards if reward is not None]


def _share_of_mixed(groups: list[Group]) -> float:
    return sum(not is_constant(np.array(_rewards(group))) for group in groups) / len(groups)


def _mean_reward(groups: list[Group]) -> float | None:
    rewards = [reward for group in groups for reward in _rewards(group)]
    return sum(rewards) / len(rewards) if rewards else None


def _bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _most_used(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _free(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _advice(found: Preview, settings: RlSettings) -> list[str]:
    advice = []
    if found.mixed < FEW_MIXED:
        easier = found.reward is not None and found.reward < 0.5
        what = (
            "take easier tasks, fine-tune on a few answers first, or raise group_size"
            if easier
            else "take harder tasks, or raise sampler.temperature"
        )
        advice.append(
            f"only {found.mixed:.0%} of the groups have different rewards, and only they teach: {what}"
        )
    cut = sum(rollout.finish_reason == "length" for rollout in found.group)
    if cut * 4 > len(found.group):
        advice.append(
            f"{cut} of {len(found.group)} rollouts shown were cut off at sampler.max_tokens "
            f"({settings.sampler.max_tokens}); raise it, or set truncated: mask"
        )
    if found.failed:
        advice.append(
            f"{found.failed} rollouts failed; run with --json or look at them with `rollbook collect`"
        )
    return advice
