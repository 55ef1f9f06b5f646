"""The metrics of a batch of rollouts."""

from __future__ import annotations

import json
import math
import random
import statistics

import pytest

from rollbook.records.rollout_stats import ExactMean, RolloutStats
from rollbook.records.rollouts import RolloutSummary, Step, Trajectory, summarize


def exact(values: list[float]) -> ExactMean:
    mean = ExactMean()
    for value in values:
        mean.add(value)
    return mean


@pytest.mark.parametrize("scale", [1.0, 1e-320, 1e-8, 1e17, 1e307])
def test_mean_and_spread_are_the_correctly_rounded_ones(scale: float) -> None:
    values = [random.Random(n).uniform(-1, 1) * scale for n in range(50)]
    found = exact(values)
    assert found.mean == statistics.mean(values)
    assert found.std == pytest.approx(statistics.stdev(values), rel=1e-15)
    assert found.std_error == pytest.approx(statistics.stdev(values) / math.sqrt(50), rel=1e-15)
    assert (found.count, found.low, found.high) == (50, min(values), max(values))


def test_equal_values_have_no_spread_and_none_has_nothing() -> None:
    assert (exact([0.1] * 7).mean, exact([0.1] * 7).std) == (0.1, 0.0)
    assert (exact([]).mean, exact([]).std) == (0.0, None)
    assert (exact([1.0]).std, exact([1.0]).std_error) == (None, None)
    assert exact([1.7e308] * 3).mean == 1.7e308


def summary(number: int) -> RolloutSummary:
    chance = random.Random(number)
    steps = [
        Step(ob_len=3, ac_len=chance.randrange(9), reward=0.0, metrics={f"m{chance.randrange(3)}": value})
        for value in (chance.random(), 1e300 * chance.random())
    ]
    episode = Trajectory(
        steps=steps, messages=[], final_reward=chance.random(), stop_reason=chance.choice(["stop", "length"])
    )
    ids = {"run_id": "r", "split": "train", "iteration": 0, "group_idx": number % 5, "traj_idx": number}
    return summarize(episode, tags=[chance.choice(["a", "b"])], **ids)


def test_the_order_in_which_rollouts_end_shows_nowhere() -> None:
    summaries = [summary(number) for number in range(40)]
    found = set()
    for seed in range(20):
        stats = RolloutStats()
        for one in random.Random(seed).sample(summaries, len(summaries)):
            stats.add(one)
        found.add(json.dumps(stats.metrics()))
    assert len(found) == 1
