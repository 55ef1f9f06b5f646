"""Each alert is raised by a series of metrics made for it, and not by the nearest one that is all right."""

from __future__ import annotations

import json
import math
import random
import re

import pytest

from helpers.places import REPOSITORY
from rollbook.records.metrics import encode_metrics
from rollbook.rl.limits import Limits
from rollbook.rl.watch import Watch

FINE = {
    "env/all/reward/total": 0.5,
    "env/all/by_group/frac_all_bad": 0.1,
    "kl_sample_train_v1": 0.0,
    "kl_sample_train_v3": 1e-9,
    "logprob_diff_over_5": 0.0,
    "entropy": 1.0,
    "truncated/reply": 0.0,
    "truncated/episode": 0.0,
    "optim/grad_norm": 1.0,
    "optim/loss": 0.1,
    "optim/applied": 1.0,
    "groups/trained": 4,
    "duplicates/share": 0.1,
    "duplicates/expected": 0.1,
}
LIMITS = Limits(max_tokens=32, max_length=256)
K3, BAD, REWARD = "kl_sample_train_v3", "env/all/by_group/frac_all_bad", "env/all/reward/total"
NOTHING_TRAINED = ("kl_sample_train_v1", K3, "logprob_diff_over_5", "entropy", "optim/grad_norm",
                   "optim/loss", "optim/applied")  # fmt: skip


def titles(lines, *, vocabulary=50):
    """The titles that each line of metrics raises; a value of None is one that was not measured."""
    watch = Watch(vocabulary, LIMITS)
    found = []
    for line in lines:
        measured = {key: value for key, value in (FINE | line).items() if value is not None}
        found.append([finding.title for finding in watch.look(measured)])
    return found


def raised(lines, **options):
    """All of them, and the index of the line that raised each."""
    found = titles(lines, **options)
    return [(index, title) for index, line in enumerate(found) for title in line]


def rewards(*means):
    """Ten iterations of each mean reward."""
    return [{REWARD: mean} for mean in means for _ in range(10)]


MISMATCH = "sampler and trainer disagree"
FAR = "tokens with very different probabilities"
ERRORS = "many rollouts fail"
FAILS = "almost every group fails as a whole"
CUT = "many replies are cut off"
ROOM = "many episodes run out of room"
COPIES = "rollouts are copies of each other"
COLLAPSE = "entropy has collapsed while the reward falls"
GRADIENT = "the gradient is far larger than before"
LOST = "the reward has fallen to less than half of its best"
NOT_FINITE = "a step was not finite"
FIRST = "the first step does not look right"

# title, the index at which it is raised, the series; and the nearest series that raises nothing
CASES = [
    (MISMATCH, 3, [{}, *[{K3: 0.011}] * 3], [{}, *[{K3: 0.011}] * 2, {}, *[{K3: 0.011}] * 2]),
    (MISMATCH, 1, [{}, {K3: 0.11}], [{}, {K3: 0.099}]),
    (MISMATCH, 4, [{}, *[{K3: 0.011}] * 2, dict.fromkeys(NOTHING_TRAINED), {K3: 0.011}],
     [{}, *[{K3: 0.011}] * 2, dict.fromkeys(NOTHING_TRAINED), {}]),
    (MISMATCH, 1, [{"noise_floor/k3": 0.2, K3: 0.2}, {K3: 0.31}],
     [{"noise_floor/k3": 0.2, K3: 0.2}, {K3: 0.29}]),
    (FAR, 1, [{}, {"logprob_diff_over_5": 0.0011}], [{}, {"logprob_diff_over_5": 0.001}]),
    (ERRORS, 1, [{}, {"env/all/rollouts/failed": 5, "env/all/rollouts/expected": 16}],
     [{}, {"env/all/rollouts/failed": 4, "env/all/rollouts/expected": 16}]),
    (FAILS, 1, [{}, {BAD: 0.91}], [{}, {BAD: 0.9, "env/all/by_group/frac_all_good": 0.1}]),
    (CUT, 1, [{}, {"truncated/reply": 0.26}], [{}, {"truncated/reply": 0.25}]),
    (CUT, 10, [{"truncated/reply": 0.02}] * 10 + [{"truncated/reply": 0.07}],
     [{"truncated/reply": 0.02}] * 10 + [{"truncated/reply": 0.06}]),
    (ROOM, 1, [{}, {"truncated/episode": 0.26}], [{}, {"truncated/episode": 0.25}]),
    (ROOM, 10, [{"truncated/episode": 0.02}] * 10 + [{"truncated/episode": 0.07}],
     [{"truncated/episode": 0.02}] * 10 + [{"truncated/episode": 0.06}]),
    (COPIES, 1, [{}, {"duplicates/share": 0.7, "duplicates/expected": 0.1}],
     [{}, {"duplicates/share": 1.0, "duplicates/expected": 0.6}]),  # a model that is sure of its answer
    (COLLAPSE, 11, [*rewards(0.5), *[{REWARD: 0.3, "entropy": 0.09}] * 3],
     [*rewards(0.5), *[{REWARD: 0.3, "entropy": 0.11}] * 3]),
    (COLLAPSE, 11, [*rewards(0.5), *[{REWARD: 0.3, "entropy": 0.019}] * 3],
     [*rewards(0.5), *[{REWARD: 0.48, "entropy": 0.019}] * 3]),
    (COLLAPSE, 12, [dict.fromkeys(NOTHING_TRAINED) | {"groups/trained": 1}, *rewards(0.5),
                    *[{REWARD: 0.3, "entropy": 0.01}] * 2], rewards(0.5, 0.6)),
    (GRADIENT, 10, [{}] * 10 + [{"optim/grad_norm": 20.1}], [{}] * 10 + [{"optim/grad_norm": 19.9}]),
    (LOST, 29, [*rewards(0.5), *rewards(0.5), *rewards(0.249)], rewards(0.5, 0.5, 0.251)),
    (NOT_FINITE, 1, [{}, {"optim/applied": 0.5}], [{}, {}]),
    (FIRST, 0, [{"groups/trained": 0}], [{}, {"groups/trained": 0}]),
    (FIRST, 0, [{"entropy": math.log(50) + 0.01}], [{"entropy": math.log(50)}]),
    (FIRST, 0, [{"entropy": 0.0}], [{"entropy": 1e-6}]),
    (FIRST, 0, [{"kl_sample_train_v1": -0.051}], [{"kl_sample_train_v1": 0.05}]),
    (FIRST, 0, [{K3: 0.011}], [{}, {K3: 0.011}]),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[1]}")
def test_an_alert_is_raised_where_it_begins_to_hold_and_not_by_what_is_all_right(case):
    title, index, series, right = case
    assert raised(series) == [(index, title)]
    assert raised(right) == []


@pytest.mark.parametrize(
    ("limits", "raise_it"),
    [
        (LIMITS, "raise sampler.max_length (256), or set truncated: mask"),
        (LIMITS._replace(of_model=512), "raise sampler.max_length (256), or"),
        (LIMITS._replace(max_episode_tokens=100), "raise sampler.max_episode_tokens (100), or"),
        (
            LIMITS._replace(max_episode_tokens=256),
            "raise sampler.max_episode_tokens (256), or",
        ),
        (
            LIMITS._replace(of_model=256),
            "all that the model takes: lower sampler.max_tokens (32) or environm",
        ),
    ],
)
def test_what_ends_replies_and_episodes_is_named_by_its_setting(limits, raise_it):
    watch = Watch(50, limits)
    watch.look(FINE)
    found = watch.look(FINE | {"truncated/reply": 0.5, "truncated/episode": 0.75})
    replies, episodes = (finding.text for finding in found)
    assert (
        replies
        == "in 50% of the rollouts a reply was cut off; raise sampler.max_tokens (32), or set truncated: mask"
    )
    assert episodes.startswith("75% of the rollouts ended for lack of it; ") and raise_it in episodes


def test_every_alert_of_the_docs_has_a_case():
    """But those that follow from no metric: tests of the player and of troubled environments raise them."""
    section = (REPOSITORY / "docs/metrics.md").read_text().partition("## Alerts")[2]
    documented = set(re.findall(r"^\| ([^|`]+) \| ", section, re.MULTILINE)) - {"alert"}
    others = {"nothing has finished for a while", "every rollout of eval NAME failed", "the run has diverged"}
    assert documented - others == {case[0] for case in CASES}


def test_a_run_that_goes_well_raises_nothing():
    """Rewards that rise to 1 and stay there but for chance, entropy that goes down to nothing with them, some
    iterations in which nothing is left to learn."""
    chance = random.Random(0)
    lines = []
    for index in range(300):
        skill = 1 - math.exp(-index / 30)
        lines.append(
            {
                REWARD: min(1.0, 0.3 + 0.69 * skill + chance.gauss(0, 0.01)),
                BAD: max(0.0, 0.5 - skill),
                "entropy": 0.005 + 0.6 * math.exp(-index / 40),
                "duplicates/share": 0.3 + 0.65 * skill,
                "duplicates/expected": 0.3 + 0.65 * skill + chance.gauss(0, 0.05),
                "optim/grad_norm": chance.lognormvariate(0, 0.7),
                "truncated/reply": 0.02 * chance.random(),
                K3: 1e-5 * chance.random(),
                "noise_floor/k3": 1e-6 if index % 10 == 0 else None,
            }
            | (dict.fromkeys(NOTHING_TRAINED) if index and index % 17 == 0 else {})
        )
    assert raised(lines) == []


def test_a_first_iteration_that_trains_nothing_says_what_became_of_its_groups():
    groups = {"groups/trained": 0, "groups/constant": 2, "groups/truncated": 6, "groups/failed": 0}
    (finding,) = Watch(50, LIMITS).look(dict.fromkeys(NOTHING_TRAINED) | groups)
    wanted = "nothing was trained: of the groups, 2 have equal rewards, 6 were cut off"
    assert (finding.title, finding.text) == (FIRST, wanted)


def test_what_holds_is_raised_once_and_again_after_it_was_gone():
    found = raised([{}, *[{K3: 0.02}] * 5, {}, *[{K3: 0.02}] * 3])
    assert found == [(3, MISMATCH), (9, MISMATCH)]


def test_the_noise_floor_is_taken_off_until_it_is_measured_again():
    noisy = {K3: 0.15}
    assert titles([{**noisy, "noise_floor/k3": 0.149}, noisy, noisy, noisy]) == [[]] * 4


def test_lines_of_a_file_are_looked_at_like_those_of_a_run():
    """A number that is not finite is null there. A resumed run looks at them again."""
    broken = {"optim/loss": math.nan, "optim/grad_norm": math.inf, "optim/applied": 0.0, "entropy": math.nan}
    lines = [FINE | broken, *[FINE] * 8, FINE | broken, FINE | {"optim/grad_norm": 30.0}]
    stored = [json.loads(encode_metrics(line, step)) for step, line in enumerate(lines)]
    live, resumed = Watch(50, LIMITS), Watch(50, LIMITS)
    found = [[finding.title for finding in live.look(line)] for line in lines]
    assert found == [[finding.title for finding in resumed.look(line)] for line in stored]
    wanted = {0: [NOT_FINITE, FIRST], 9: [NOT_FINITE], 10: [GRADIENT]}
    assert {step: titles for step, titles in enumerate(found) if titles} == wanted
