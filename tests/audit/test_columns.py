"""What is counted by columns equals what the record's own functions count rollout by rollout."""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.audit import recount
from rollbook.audit.auditor import Auditor
from rollbook.audit.missing import LeftOut
from rollbook.audit.places import Moments, Places, numbered
from rollbook.audit.tables import Summaries
from rollbook.audit.token_rows import UNKNOWN, TurnColumns, TurnLine, digests_of, parts_of
from rollbook.records.rollout_stats import RolloutStats
from rollbook.records.rollouts import RolloutSummary, Status, Step
from rollbook.records.turns import Usage, lengths_of, token_rows

ids = st.lists(st.integers(0, 50_000), max_size=4)


@st.composite
def turns(draw: Any) -> list[TurnLine]:
    """Of one rollout: rewritten histories, empty prompts and replies, tokens that nobody knows."""
    made = []
    for _ in range(draw(st.integers(0, 4))):
        sampled = draw(ids)
        turn = TurnLine(
            prompt_token_ids=draw(ids),
            token_ids=sampled,
            logprobs=[draw(st.none() | st.floats(-30, 0)) for _ in sampled],
            new_row=draw(st.sampled_from([None, None, "the history was rewritten"])),
            finish_reason=draw(st.sampled_from(["stop", "length"])),
            usage=draw(st.none() | st.just(Usage(7, 3))),
        )
        if draw(st.integers(0, 9)) == 0:
            turn.token_ids = turn.logprobs = None
        made.append(turn)
    return made


@given(st.lists(turns(), max_size=5))
def test_turns_by_columns_are_turns_one_by_one(turns_R: list[list[TurnLine]]) -> None:
    columns = TurnColumns()
    columns.add(turns_R[:2])
    columns.add(turns_R[2:])
    found = parts_of(columns)
    lengths = [pair for own in turns_R for pair in lengths_of(own)]
    assert found.seen.tolist() == [UNKNOWN if seen is None else seen for seen, _ in lengths]
    assert found.sampled.tolist() == [UNKNOWN if sampled is None else sampled for _, sampled in lengths]
    assert found.cut_off.tolist() == [turn.finish_reason == "length" for own in turns_R for turn in own]
    assert not len(found.misaligned)
    part = 0
    for own, count in zip(turns_R, found.counts.tolist(), strict=True):
        if all(turn.token_ids is not None for turn in own):
            rows = token_rows(own)
            assert len(rows) == count == len(digests_of(own))
            values = iter([value for turn in own for value in turn.logprobs or ()])
            for number, row in enumerate(rows):
                logprobs = [next(values) for sampled in row.sampled if sampled]
                seen = logprobs[1:] if row.sampled[:1] == [True] else logprobs
                assert found.trained[part + number] == sum(row.sampled[1:]) == len(seen)
                wanted = math.nan if None in logprobs else math.fsum(seen)  # type: ignore[arg-type]
                assert found.logprobs[part + number] == pytest.approx(wanted, nan_ok=True, abs=1e-9)
        part += count


def test_turns_with_fewer_logprobs_than_tokens_are_told() -> None:
    columns = TurnColumns()
    columns.add([[TurnLine([1], [2, 3], [-0.1, -0.2])], [TurnLine([1], [2, 3], [-0.1])]])
    assert parts_of(columns).misaligned.tolist() == [1]


numbers = st.sampled_from([0.0, 0.25, 0.5, 1.0, -3.0])


@st.composite
def summaries(draw: Any) -> RolloutSummary:
    steps = [
        Step(
            step_idx=index,
            ob_len=draw(st.none() | st.integers(0, 9)),
            ac_len=draw(st.none() | st.integers(0, 9)),
            reward=draw(numbers),
            metrics=draw(
                st.dictionaries(st.sampled_from(["correct", "stop/x", "note"]), numbers | st.just("text"))
            ),
        )
        for index in range(draw(st.integers(0, 3)))
    ]
    failed = draw(st.integers(0, 4)) == 0
    return RolloutSummary(
        split="train",
        iteration=0,
        group_idx=draw(st.integers(0, 3)),
        traj_idx=0,
        tags=draw(st.sampled_from([["a"], ["a", "b"], ["all"], []])),
        status=Status.ERROR if failed else Status.OK,
        total_reward=None if failed else draw(numbers | st.none()),
        stop_reason=draw(st.sampled_from([None, "stop", "length"])),
        trajectory_metrics=draw(st.dictionaries(st.sampled_from(["correct", "own"]), numbers)),
        steps=steps,
    )


@given(st.lists(summaries(), max_size=8))
def test_metrics_are_counted_again_as_they_were_counted(
    tmp_path_factory: pytest.TempPathFactory, rollouts: list[RolloutSummary]
) -> None:
    stats = RolloutStats()
    lines = []
    for place, summary in enumerate(rollouts):
        stats.add(summary)
        lines.append(msgspec.structs.replace(summary, traj_idx=place).encode() + b"\n")
    path = tmp_path_factory.mktemp("summaries") / "train_iteration_000000_rollout_summaries.jsonl"
    path.write_bytes(b"".join(lines))
    table = Summaries(path)
    table.read(Auditor(path.parent), None)
    wanted = stats.metrics()
    for key in ("env/all/rollouts/expected", "env/all/rollouts/missing"):
        wanted.pop(key)  # nobody can count what is not there
    found = recount.of_rollouts(table, "train")
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert found[key] == pytest.approx(value, rel=1e-12, abs=1e-12), key


@given(st.lists(st.integers(0, 6), max_size=12))
def test_groups_are_numbered_in_any_order(groups: list[int]) -> None:
    for order in (groups, sorted(groups)):
        names, places = numbered(np.array(order, np.int64))
        assert names.tolist() == sorted(set(groups)) and names[places].tolist() == order


@given(st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), max_size=20))
def test_moments_are_those_of_the_known_numbers(values: list[float]) -> None:
    moments = Moments()
    moments.add(np.array(values[:7]))
    moments.add(np.array(values[7:]))
    known = [value for value in values if not math.isnan(value)]
    assert moments.count == len(known)
    assert moments.mean == (pytest.approx(np.mean(known), abs=1e-6) if known else None)
    if len(known) > 1:
        assert moments.variance == pytest.approx(np.var(known, ddof=1), rel=1e-6, abs=1e-3)


@pytest.mark.parametrize(
    ("which", "said"), [("long", "these are the long ones"), ("any", "no sign"), ("few", "too few")]
)
def test_missing_rollouts_are_compared_by_the_others_of_their_prompts(which: str, said: str) -> None:
    chance = random.Random(1)
    mean_G = [chance.choice([50, 200]) for _ in range(100)]
    rollouts = [(group, chance.gauss(mean_G[group], 10)) for group in range(100) for _ in range(8)]
    weights = [20.0 if which == "long" and mean_G[group] == 200 else 1.0 for group, _ in rollouts]
    count = 3 if which == "few" else 60
    lost = set(chance.choices(range(len(rollouts)), weights, k=count))
    there = [one for place, one in enumerate(rollouts) if place not in lost]
    left_out = LeftOut()
    left_out.add(
        "missing",
        np.array([group for group, _ in there]),
        np.array([tokens for _, tokens in there]),
        np.full(len(there), np.nan),
        np.array([rollouts[place][0] for place in sorted(lost)]),
    )
    (compared,) = left_out.comparisons(Places())
    assert compared.rollouts == len(lost) and compared.says.startswith(said)
    assert compared.reward is None
