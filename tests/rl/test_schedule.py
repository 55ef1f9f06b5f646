from collections import Counter

from rollbook.rl.schedule import Schedule


def test_every_task_comes_once_before_one_comes_twice():
    schedule = Schedule(3, weights=[1.0], sizes=[10], groups=4)
    tasks = [draw.task for i in range(10) for draw in schedule.draws(i)]
    for epoch in range(4):
        assert sorted(tasks[10 * epoch : 10 * epoch + 10]) == list(range(10))
    assert tasks[:10] != tasks[10:20]


def test_an_iteration_draws_the_same_whoever_asks_and_when():
    one = Schedule(3, weights=[1.0, 2.0], sizes=[10, 7], groups=5)
    in_order = [one.draws(i) for i in range(20)]
    other = Schedule(3, weights=[1.0, 2.0], sizes=[10, 7], groups=5)
    assert other.draws(17) == in_order[17]
    assert other.draws(2) == in_order[2]
    assert Schedule(4, weights=[1.0, 2.0], sizes=[10, 7], groups=5).draws(17) != in_order[17]


def test_environments_are_drawn_by_weight():
    schedule = Schedule(0, weights=[1.0, 3.0], sizes=[5, 5], groups=50)
    drawn = Counter(draw.environment for i in range(40) for draw in schedule.draws(i))
    assert 0.70 < drawn[1] / 2000 < 0.80
    of_first = [draw.task for i in range(40) for draw in schedule.draws(i) if draw.environment == 0]
    assert sorted(of_first[:5]) == [0, 1, 2, 3, 4]
