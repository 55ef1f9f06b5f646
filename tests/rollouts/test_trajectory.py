"""An episode, finished or not, as the record takes it."""

from __future__ import annotations

from rollbook.records.rollouts import summarize, summarize_failure
from rollbook.records.turns import Turn, Usage
from rollbook.rollouts.episode import episode_played_elsewhere
from rollbook.rollouts.trajectory import trajectory_of
from rollbook.rollouts.types import Episode

IDS = {"split": "train", "iteration": 0, "group_idx": 0, "traj_idx": 0}
REPLY = {"role": "assistant", "content": "4"}


def _episode(*rewards: float | None) -> Episode:
    turns = [
        Turn(messages=[REPLY], reward=reward, prompt_token_ids=[1], token_ids=[2, 3], usage=Usage(1, 2))
        for reward in rewards
    ]
    prompt = [{"role": "user", "content": "2 + 2?"}]
    return Episode(prompt=prompt, turns=turns, metrics={"a": 1}, final_reward=0.5, stop_reason="length")


def test_turns_prompt_and_rewards_are_those_of_the_episode() -> None:
    episode = _episode(0.25, 1.0)
    trajectory = trajectory_of(episode)
    assert trajectory.turns is episode.turns and trajectory.prompt is episode.prompt
    assert trajectory.metrics == {"a": 1}
    assert trajectory.total_reward() == episode.reward == 1.75
    summary = summarize(trajectory, **IDS)
    assert [step.ac_len for step in summary.steps] == [2, 2]
    assert (summary.total_reward, summary.final_reward, summary.stop_reason) == (1.75, 0.5, "length")


def test_an_episode_that_failed_is_recorded_without_a_reward() -> None:
    episode = _episode(0.25, None)
    assert episode.reward is None and trajectory_of(episode).total_reward() is None
    summary = summarize_failure("broken", trajectory_of(episode), **IDS)
    assert (summary.total_reward, len(summary.steps)) == (None, 2)


def test_an_episode_that_was_played_elsewhere_keeps_its_whole_reward() -> None:
    episode = episode_played_elsewhere([], [REPLY, {"role": "user", "content": "?"}, REPLY], 0.75)
    assert [len(turn.messages) for turn in episode.turns] == [2, 1]
    assert trajectory_of(episode).total_reward() == episode.reward == 0.75
    assert episode_played_elsewhere([], [], 0.75).reward == 0.75
