import numpy as np
import pytest

from rollbook.rl.advantages import advantages, is_constant


@pytest.mark.parametrize(
    "name, rewards, expected",
    [
        ("mean", [1, 0, 0, 1], [0.5, -0.5, -0.5, 0.5]),
        ("mean", [3, 1, 2], [1, -1, 0]),
        # The sample deviation of 1, 0, 0, 1 is sqrt(1/3).
        ("std", [1, 0, 0, 1], [0.75**0.5, -(0.75**0.5), -(0.75**0.5), 0.75**0.5]),
        ("std", [0, 2], [-(0.5**0.5), 0.5**0.5]),
        # 1 against the mean 1/3 of the others; 0 against 2/3.
        ("leave_one_out", [1, 0, 0, 1], [2 / 3, -2 / 3, -2 / 3, 2 / 3]),
        ("leave_one_out", [3, 1, 2], [1.5, -1.5, 0]),
    ],
)
def test_advantages_equal_hand_computed_ones(name, rewards, expected):
    assert advantages(np.array(rewards), name) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["mean", "std", "leave_one_out"])
@pytest.mark.parametrize("rewards", [[0.7] * 8, [1 / 3] * 3, [0.1 + 0.2, 0.3], [0] * 7 + [1e-9], [5], []])
def test_rewards_that_do_not_differ_give_exactly_zero(name, rewards):
    assert (advantages(np.array(rewards), name) == 0).all()
    assert is_constant(np.array(rewards))


def test_leave_one_out_is_the_distance_from_the_mean_of_the_others():
    rewards = np.random.default_rng(0).random(7)
    others = [np.delete(rewards, index).mean() for index in range(7)]
    assert advantages(rewards, "leave_one_out") == pytest.approx(rewards - others)
