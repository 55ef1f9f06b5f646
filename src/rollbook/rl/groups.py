"""From the episodes of an iteration to what is trained, and what becomes of every rollout.

Each rollout that was asked for ends with exactly one fate (`records/iterations.Fate`), so that the books of
an iteration balance.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from rollbook.records.iterations import Fate, RolloutFate
from rollbook.records.turns import CUT_OFF, NO_ROOM, OUT_OF_TOKENS, Turn, token_rows
from rollbook.rl.advantages import Name, advantages, is_constant
from rollbook.rollouts.types import Episode
from rollbook.train.batch import Example, ExampleKey


class Group(NamedTuple):
    """The rollouts of one task. Those without an episode failed."""

    group_idx: int
    episodes: list[Episode | None]  # by traj_idx


# A group has one of these. A group of which no rollout was left to compare is truncated if one was cut off.
VERDICTS = (Fate.TRAINED, Fate.SURPLUS, Fate.CONSTANT, Fate.LONE, Fate.TRUNCATED, Fate.FAILED)


class Selection(NamedTuple):
    """What an iteration trains on, in order, and the fate of every rollout."""

    examples: list[Example]
    fates: list[RolloutFate]

    def count(self, fate: Fate) -> int:
        return sum(rollout.fate is fate for rollout in self.fates)

    @property
    def verdicts(self) -> dict[int, Fate]:
        """What became of each group: the first of `VERDICTS` that a rollout of it has."""
        found: dict[int, Fate] = {}
        for rollout in self.fates:
            before = found.get(rollout.group_idx, rollout.fate)
            found[rollout.group_idx] = min(before, rollout.fate, key=VERDICTS.index)
        return found


def select(
    groups: Sequence[Group],
    *,
    split: str,
    iteration: int,
    at_most: int,
    advantage: Name,
    truncated: Literal["train", "mask", "drop"],
) -> Selection:
    """The first `at_most` groups whose rewards differ are trained; advantages stay within each group."""
    examples: list[Example] = []
    fates: list[RolloutFate] = []
    trained_groups = 0
    for group in groups:
        judged = _judge(group, advantage, truncated, is_full=trained_groups == at_most)
        fates += judged
        trained_groups += any(rollout.fate is Fate.TRAINED for rollout in judged)
        for rollout in judged:
            if rollout.fate is Fate.TRAINED:
                episode = group.episodes[rollout.traj_idx]
                assert episode is not None and rollout.advantage is not None
                key = ExampleKey(split, iteration, rollout.group_idx, rollout.traj_idx)
                examples += examples_of(episode, rollout.advantage, key)
    return Selection(examples, fates)


def _judge(group: Group, advantage: Name, truncated: str, *, is_full: bool) -> list[RolloutFate]:
    fates: dict[int, tuple[Fate, float | None]] = {}
    rewards: dict[int, float] = {}
    for index, episode in enumerate(group.episodes):
        reward = episode.reward if episode is not None else None
        if episode is None or reward is None:
            fates[index] = Fate.FAILED, None
        elif truncated == "drop" and is_truncated(episode):
            fates[index] = Fate.TRUNCATED, None
        else:
            rewards[index] = reward
    rewards_G = np.array(list(rewards.values()), dtype=np.float64)
    if is_constant(rewards_G):
        fate = Fate.CONSTANT if len(rewards_G) > 1 else Fate.LONE
        fates |= dict.fromkeys(rewards, (fate, 0.0 if fate is Fate.CONSTANT else None))
    else:
        for index, value in zip(rewards, advantages(rewards_G, advantage).tolist(), strict=True):
            episode = group.episodes[index]
            assert episode is not None
            is_masked = truncated == "mask" and is_truncated(episode)
            fate = Fate.SURPLUS if is_full else Fate.TRUNCATED if is_masked else Fate.TRAINED
            fates[index] = fate, value
    return [RolloutFate(group.group_idx, index, *fates[index]) for index in range(len(group.episodes))]


def is_truncated(episode: Episode) -> bool:
    """Whether a token limit ended a reply or the episode."""
    return episode.stop_reason in OUT_OF_TOKENS or any(map(_is_cut_off, episode.turns))


class Cuts(NamedTuple):
    """Which limits ended something; one of them did if the episode is truncated."""

    reply: bool  # a reply reached `max_tokens`
    episode: bool  # `max_length` or `max_episode_tokens` left no room for a whole reply, or for another one


def cuts_of(episode: Episode, max_tokens: int) -> Cuts:
    """`max_tokens` is what a reply of the episode may have: one that ended before it ran out of room."""
    lengths = [len(turn.token_ids or ()) for turn in episode.turns if _is_cut_off(turn)]
    return Cuts(
        reply=any(length >= max_tokens for length in lengths),
        episode=episode.stop_reason == NO_ROOM or any(length < max_tokens for length in lengths),
    )


def _is_cut_off(turn: Turn) -> bool:
    return turn.finish_reason == CUT_OFF


def examples_of(episode: Episode, advantage: float, key: ExampleKey) -> list[Example]:
    """The training rows of an episode: one, or one more wherever its history was rewritten."""
    examples = []
    for part, row in enumerate(token_rows(episode.turns)):
        size = len(row.token_ids)
        columns: dict[str, Any] = {
            "reward": np.full(size, episode.reward, np.float32),
            "advantage": np.full(size, advantage, np.float32),
            "sampled_logprob": np.full(size, np.nan, np.float32),
            "temperature": np.ones(size, np.float32),
            "turn": np.full(size, -1, np.int32),
            "version": np.full(size, -1, np.int32),
        }
        for index, start, end in row.turns:
            turn = episode.turns[index]
            columns["sampled_logprob"][start:end] = turn.logprobs
            columns["temperature"][start:end] = turn.temperature
            columns["turn"][start:end] = index
            columns["version"][start:end] = -1 if turn.policy_version is None else turn.policy_version
        examples.append(
            Example(
                np.asarray(row.token_ids, np.int32),
                np.asarray(row.sampled, np.bool_),
                columns,
                key._replace(part=part),
            )
        )
    return examples


class Duplicates(NamedTuple):
    """The part of the rollouts whose sampled tokens another rollout of the same group has too."""

    share: float
    expected: float  # by the probabilities of the rollouts alone, if each was sampled for itself


def duplicates(groups: Sequence[Group]) -> Duplicates:
    """A rollout of probability p is one of n in its group: another one equals it with 1 - (1 - p)^(n - 1)."""
    same = total = 0
    expected = 0.0
    for group in groups:
        episodes = [episode for episode in group.episodes if episode is not None]
        counts = Counter(map(_sampled_tokens, episodes))
        same += sum(count for count in counts.values() if count > 1)
        total += len(episodes)
        expected += sum(1 - (1 - _probability(episode)) ** (len(episodes) - 1) for episode in episodes)
    return Duplicates(same / total, expected / total) if total else Duplicates(0.0, 0.0)


def _sampled_tokens(episode: Episode) -> tuple[int, ...]:
    return tuple(token for turn in episode.turns for token in turn.token_ids or ())


def _probability(episode: Episode) -> float:
    """How likely the sampled tokens of an episode were, given what the environment said."""
    return math.exp(min(0.0, sum(sum(turn.logprobs or ()) for turn in episode.turns)))
