from rollbook.rl.watch import Watch

FINE = {
    "env/all/reward/total": 0.5,
    "env/all/by_group/frac_all_bad": 0.1,
    "kl_sample_train_v1": 0.0,
    "kl_sample_train_v3": 1e-9,
    "entropy": 1.0,
    "truncated/share": 0.0,
    "optim/grad_norm": 1.0,
    "optim/loss": 0.1,
    "optim/applied": 1.0,
    "groups/trained": 4,
    "duplicates/share": 0.1,
}


def titles(lines):
    """The titles that each line of metrics raises."""
    watch = Watch(vocabulary=50)
    return [[found.title for found in watch.look(FINE | line)] for line in lines]


def test_a_run_that_goes_well_raises_nothing():
    rising = [{"env/all/reward/total": index / 100, "entropy": 1.0 - index / 100} for index in range(100)]
    assert titles(rising) == [[]] * 100


def test_a_mismatch_is_raised_once_it_lasts_and_again_after_it_was_gone():
    found = titles([{}, *[{"kl_sample_train_v3": 0.02}] * 4, {}, *[{"kl_sample_train_v3": 0.02}] * 3])
    assert [index for index, line in enumerate(found) if line] == [3, 8]
    assert titles([{}, {"kl_sample_train_v3": 0.2}])[1] == ["sampler and trainer disagree"]


def test_the_noise_floor_is_taken_off_until_it_is_measured_again():
    noisy = {"kl_sample_train_v3": 0.15}
    assert titles([{**noisy, "noise_floor/k3": 0.149}, noisy, noisy, noisy]) == [[]] * 4


def test_constant_groups_are_raised_only_if_they_are_all_bad():
    assert titles([{}, {"env/all/by_group/frac_all_good": 1.0}])[1] == []
    assert titles([{}, {"env/all/by_group/frac_all_bad": 0.95}])[1] == ["almost every group fails as a whole"]


def test_low_entropy_is_raised_only_while_the_reward_falls():
    rising = [{"env/all/reward/total": 0.5 + index / 50, "entropy": 0.01} for index in range(1, 20)]
    assert titles([{}, *rising]) == [[]] * 20
    falling = [{"env/all/reward/total": 0.5 - index / 100, "entropy": 0.01} for index in range(1, 20)]
    assert ["entropy has collapsed while the reward falls"] in titles([{}, *falling])


def test_truncation_gradients_and_a_lost_reward_are_raised():
    assert titles([{}, {"truncated/share": 0.3}])[1] == ["many replies are cut off"]
    slowly = [{"truncated/share": 0.02}] * 9 + [{"truncated/share": 0.07}]
    assert titles(slowly)[9] == ["many replies are cut off"]
    assert titles([{}] * 10 + [{"optim/grad_norm": 50.0}])[10] == ["the gradient is far larger than before"]
    lost = [{}] * 12 + [{"env/all/reward/total": 0.1}] * 10
    assert ["the reward has fallen to less than half of its best"] in titles(lost)
    assert titles([{}, {"optim/applied": 0.0}])[1] == ["a step was not finite"]


def test_the_first_step_is_looked_at_more_closely():
    bad = titles([{"duplicates/share": 0.9, "groups/trained": 0, "entropy": 5.0}])[0]
    assert bad == ["the first step does not look right"]
