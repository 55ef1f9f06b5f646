import math

import numpy as np
import pytest

from rollbook.audit.places import NUMBERS
from rollbook.audit.recount import of_fates
from rollbook.records.iterations import Fate, RolloutFate
from rollbook.records.turns import Turn
from rollbook.rl import metrics
from rollbook.rl.groups import Cuts, Group, cuts_of, duplicates, is_truncated, select
from rollbook.rollouts.types import Episode


def turn(token_ids, reward=0.0, *, prompt=(1, 2), finish="stop", **more):
    return Turn(
        messages=[{"role": "assistant", "content": "x"}],
        reward=reward,
        prompt_token_ids=list(prompt),
        token_ids=list(token_ids),
        logprobs=[-0.5 - index for index in range(len(token_ids))],
        temperature=0.7,
        policy_version=3,
        finish_reason=finish,
        **more,
    )


def episode(reward, *, finish="stop", tokens=(5, 6)):
    return Episode(prompt=[], turns=[turn(tokens, reward, finish=finish)])


def choose(groups, *, at_most=9, truncated="train", advantage="mean"):
    return select(
        [Group(index, episodes) for index, episodes in enumerate(groups)],
        split="train", iteration=4, at_most=at_most, advantage=advantage, truncated=truncated,
    )  # fmt: skip


def fates(selection):
    return [(fate.group_idx, fate.traj_idx, fate.fate, fate.advantage) for fate in selection.fates]


def test_uneven_groups_are_compared_with_their_own_survivors_only():
    selection = choose([
        [episode(1), episode(0), episode(0), episode(1)],
        [episode(1), None, episode(0), episode(0)],
        [None, None, episode(1), None],
    ])  # fmt: skip
    assert fates(selection) == [
        (0, 0, Fate.TRAINED, 0.5), (0, 1, Fate.TRAINED, -0.5),
        (0, 2, Fate.TRAINED, -0.5), (0, 3, Fate.TRAINED, 0.5),
        (1, 0, Fate.TRAINED, pytest.approx(2 / 3)), (1, 1, Fate.FAILED, None),
        (1, 2, Fate.TRAINED, pytest.approx(-1 / 3)), (1, 3, Fate.TRAINED, pytest.approx(-1 / 3)),
        (2, 0, Fate.FAILED, None), (2, 1, Fate.FAILED, None),
        (2, 2, Fate.LONE, None), (2, 3, Fate.FAILED, None),
    ]  # fmt: skip
    assert [example.key[2:4] for example in selection.examples] == [
        (0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 2), (1, 3)
    ]  # fmt: skip


def test_constant_groups_and_those_after_enough_mixed_ones_are_not_trained():
    mixed = [episode(1), episode(0)]
    selection = choose([[episode(1), episode(1)], mixed, mixed, mixed], at_most=2)
    assert [fate.fate for fate in selection.fates] == [Fate.CONSTANT] * 2 + [Fate.TRAINED] * 4 + [
        Fate.SURPLUS
    ] * 2
    assert list(selection.verdicts.values()) == [
        Fate.CONSTANT, Fate.TRAINED, Fate.TRAINED, Fate.SURPLUS
    ]  # fmt: skip


def test_every_group_has_one_verdict():
    good, bad, cut = episode(1), episode(0), episode(0, finish="length")
    groups = {
        (Fate.TRAINED, Fate.TRAINED, Fate.TRAINED): [good, bad, None],
        (Fate.TRAINED, Fate.TRAINED, Fate.LONE): [good, cut, None],
        (Fate.TRAINED, Fate.TRUNCATED, Fate.TRUNCATED): [episode(1, finish="length"), cut, None],
        (Fate.CONSTANT, Fate.CONSTANT, Fate.TRUNCATED): [cut, cut, None],
        (Fate.CONSTANT, Fate.CONSTANT, Fate.CONSTANT): [good, good, None],
        (Fate.LONE, Fate.LONE, Fate.LONE): [None, bad, None],
        (Fate.LONE, Fate.LONE, Fate.TRUNCATED): [None, cut, None],
        (Fate.FAILED, Fate.FAILED, Fate.FAILED): [None, None, None],
    }
    for place, truncated in enumerate(("train", "mask", "drop")):
        found = choose(list(groups.values()), truncated=truncated).verdicts
        assert list(found.values()) == [verdicts[place] for verdicts in groups]


@pytest.mark.parametrize("seed", range(20))
def test_verdicts_add_up_to_the_groups_that_were_drawn_and_the_audit_counts_the_same(seed):
    chance = np.random.default_rng(seed)
    fail, cut, ungraded = chance.random(3) * [1, 1, 0.2]

    def drawn():
        if chance.random() < fail:
            return None
        reward = None if chance.random() < ungraded else float(chance.integers(0, 3))
        return episode(reward, finish="length" if chance.random() < cut else "stop")

    groups = [Group(number, [drawn() for _ in range(chance.integers(1, 5))]) for number in range(40)]
    for truncated in ("train", "mask", "drop"):
        selection = select(
            groups, split="train", iteration=0, at_most=int(chance.integers(0, 12)), advantage="mean",
            truncated=truncated,
        )  # fmt: skip
        values = metrics.of_sampling(groups, selection, max_tokens=3)
        counts = {key: value for key, value in values.items() if key.startswith("groups/")}
        drawn_groups = counts.pop("groups/drawn")
        assert drawn_groups == len(groups) == sum(counts.values())
        episodes = [one for group in groups for one in group.episodes]
        counted = of_fates(
            np.array([fate.group_idx for fate in selection.fates]),
            np.array([NUMBERS[fate.fate] for fate in selection.fates]),
            np.array([one is not None and is_truncated(one) for one in episodes]),
            np.array([one is not None for one in episodes]),
            np.array([0.0 if one is None else 2.0 for one in episodes]),
        )
        assert {key: values[key] for key in counted} == counted and counts.keys() <= counted.keys()


def test_a_masked_truncated_rollout_counts_in_the_baseline_and_a_dropped_one_does_not():
    group = [episode(1), episode(0), episode(0, finish="length"), episode(1)]
    masked = choose([group], truncated="mask")
    assert [fate.fate for fate in masked.fates] == [
        Fate.TRAINED, Fate.TRAINED, Fate.TRUNCATED, Fate.TRAINED
    ]  # fmt: skip
    assert masked.fates[0].advantage == 0.5
    dropped = choose([group], truncated="drop")
    assert dropped.fates[2] == RolloutFate(0, 2, Fate.TRUNCATED, None)
    assert dropped.fates[0].advantage == pytest.approx(1 / 3)
    assert all(fate.fate is Fate.TRAINED for fate in choose([group], truncated="train").fates)


def test_an_episode_that_grew_too_long_between_two_replies_is_truncated_too():
    """Its replies all ended by themselves; there was no room for another one."""
    grown = Episode(prompt=[], turns=[turn([5, 6], 1.0)], stop_reason="max_length")
    masked = choose([[grown, episode(0)]], truncated="mask")
    assert [fate.fate for fate in masked.fates] == [Fate.TRUNCATED, Fate.TRAINED]
    over = Episode(prompt=[], turns=[turn([5, 6], 1.0)], stop_reason="max_turns")
    assert choose([[over, episode(0)]], truncated="mask").fates[0].fate is Fate.TRAINED


def cut(*turns, stop="length"):
    return Episode(prompt=[], turns=list(turns), stop_reason=stop)


@pytest.mark.parametrize(
    ("played", "wanted"),
    [
        (cut(turn([5, 6, 7]), stop="stop"), Cuts(reply=False, episode=False)),
        (cut(turn([5, 6, 7], finish="length")), Cuts(reply=True, episode=False)),
        # The environment went on after a reply that was cut, and the episode ended as it should.
        (cut(turn([5, 6, 7], finish="length"), turn([5]), stop="stop"), Cuts(reply=True, episode=False)),
        (cut(turn([5, 6], finish="length")), Cuts(reply=False, episode=True)),
        (cut(turn([5, 6]), stop="max_length"), Cuts(reply=False, episode=True)),
        (cut(turn([5, 6, 7], finish="length"), stop="max_length"), Cuts(reply=True, episode=True)),
        (cut(turn([5, 6, 7], finish="length"), turn([5], finish="length")), Cuts(reply=True, episode=True)),
    ],
)
def test_which_limit_ended_a_reply_and_which_the_episode(played, wanted):
    """With replies of at most three tokens: one that is cut off before ran out of room."""
    assert cuts_of(played, 3) == wanted
    assert is_truncated(played) == any(wanted)


def test_only_sampled_tokens_are_trained_with_the_values_they_were_sampled_with():
    turns = [turn([5, 6], 0.25), turn([9], 0.75, prompt=[7, 8])]
    selection = choose([[Episode(prompt=[], turns=turns), episode(0)]])
    example = selection.examples[0]
    assert example.token_T.tolist() == [1, 2, 5, 6, 7, 8, 9]
    assert example.trained_T.tolist() == [False, False, True, True, False, False, True]
    columns = example.columns_T
    assert columns["turn"].tolist() == [-1, -1, 0, 0, -1, -1, 1]
    assert columns["version"].tolist() == [-1, -1, 3, 3, -1, -1, 3]
    assert np.isnan(columns["sampled_logprob"]).tolist() == [True, True, False, False, True, True, False]
    assert columns["sampled_logprob"][[2, 3, 6]].tolist() == [-0.5, -1.5, -0.5]
    assert columns["temperature"][2] == np.float32(0.7)
    assert (columns["advantage"] == 0.5).all()
    assert example.key == ("train", 4, 0, 0, 0)


def test_every_row_of_a_rewritten_history_has_the_advantage_of_its_rollout():
    turns = [turn([5]), turn([6], 1.0, prompt=[1, 2, 3], new_row="the template drops reasoning")]
    selection = choose([[Episode(prompt=[], turns=turns), episode(0)]])
    assert [example.key.part for example in selection.examples] == [0, 1, 0]
    assert [example.token_T.tolist() for example in selection.examples[:2]] == [[1, 2, 5], [1, 2, 3, 6]]
    assert {float(example.columns_T["advantage"][0]) for example in selection.examples[:2]} == {0.5}


def test_duplicates_are_counted_within_groups_beside_what_their_probabilities_explain():
    """Logprobs of -0.5 and -1.5: a rollout of two tokens has the probability exp(-2)."""
    same, other = episode(1, tokens=[5, 6]), episode(0, tokens=[7])
    found = duplicates([Group(0, [same, same, other, None]), Group(1, [same, other])])
    assert found.share == 2 / 5
    two, one = math.exp(-2), math.exp(-0.5)
    of_three = 2 * (1 - (1 - two) ** 2) + 1 - (1 - one) ** 2
    assert found.expected == pytest.approx((of_three + two + one) / 5)
    assert duplicates([Group(0, [None, None])]) == (0.0, 0.0)


def test_the_duplicates_that_are_expected_are_those_that_chance_gives():
    """Three answers, drawn again and again: on the whole as many are equal as their probabilities say."""
    chance = np.random.default_rng(0)
    probabilities = np.array([0.6, 0.3, 0.1])

    def drawn():
        token = int(chance.choice(3, p=probabilities))
        said = turn([token])
        said.logprobs = [math.log(probabilities[token])]
        return Episode(prompt=[], turns=[said])

    groups = [Group(index, [drawn() for _ in range(4)]) for index in range(2000)]
    found = duplicates(groups)
    assert found.share == pytest.approx(found.expected, abs=0.02)
