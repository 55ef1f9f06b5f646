"""Whatever belongs to a token stays with it, however examples are shuffled, packed and padded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.core import core_model, sampled_examples
from rollbook.train.batch import (
    COLUMNS,
    Batch,
    Example,
    ExampleKey,
    Shape,
    best_fit,
    idle,
    pack,
    packed_batch,
    pad,
    padded_batch,
    with_columns,
)

NAMES = ["advantage", "reference_logprob", "sampled_logprob", "temperature", "turn"]


def rows(batches: list[Batch]) -> dict[tuple[Any, int], list[float]]:
    """Every trained token by the example and the place it is of: the token, then its columns."""
    found = {}
    for batch in batches:
        for place in range(batch.trained_tokens):
            key = batch.keys[int(batch.example_N[place])]
            values = [float(batch.columns_N[name][place]) for name in NAMES]
            found[key, int(batch.offset_N[place])] = [float(batch.target_N[place]), *values]
    return found


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 30), min_size=1, max_size=12),
    seed=st.integers(0, 1000),
    filled=st.booleans(),
)
def test_t12_columns_move_with_their_tokens(lengths: list[int], seed: int, filled: bool) -> None:
    examples = sampled_examples(lengths, seed=seed)
    wanted = {}
    for example in examples:
        for offset in range(1, len(example)):
            if example.trained_T[offset]:
                values = [float(example.columns_T[name][offset]) for name in NAMES]
                wanted[example.key, offset] = [float(example.token_T[offset]), *values]
    order = np.random.default_rng(seed).permutation(len(examples))
    shuffled = [examples[place] for place in order]
    shape = Shape(64, 32) if filled else None
    for batches in (pack(shuffled, 40, shape=shape), pad(shuffled, 40), [packed_batch(shuffled)]):
        assert rows(batches) == wanted
        assert sum(batch.trained_tokens for batch in batches) == len(wanted)
        for batch in batches:  # the row before a token predicts it
            flat = batch.forward.input_ids.flatten()
            assert torch.equal(flat[batch.row_N + 1], batch.target_N)
            assert torch.equal(batch.forward.position_ids.flatten()[batch.row_N] + 1, batch.offset_N)


def test_the_first_token_is_never_trained() -> None:
    example = Example(np.array([4, 5, 6], np.int32), np.array([True, False, True]))
    for batch in (packed_batch([example, example]), padded_batch([example, example])):
        assert batch.target_N.tolist() == [6, 6] and batch.offset_N.tolist() == [2, 2]
        assert batch.example_N.tolist() == [0, 1]


def test_batches_keep_to_their_capacity_and_a_longer_example_stands_alone() -> None:
    examples = sampled_examples([50, 12, 20, 20, 8])
    assert sorted(batch.real_tokens for batch in pack(examples, 40)) == [20, 40, 50]
    padded = pad(examples, 40)
    assert [batch.allocated_tokens for batch in padded] == [50, 40, 24]
    assert pack([], 40) == [] and pad([], 40) == []


def test_a_column_that_some_examples_lack_has_its_default() -> None:
    first, second = sampled_examples([6, 7], temperature=False)
    second = replace(second, columns_T={"temperature": np.full(7, 0.5, np.float32)})
    batches = pack([first, second], 7)
    assert {tuple(batch.columns_N) for batch in batches} == {tuple(NAMES)}
    by_key = {batch.keys[0]: batch.columns_N for batch in batches}
    assert set(by_key[first.key]["temperature"].tolist()) == {1.0}
    assert by_key[second.key]["advantage"].unique().tolist() == [0.0]
    assert by_key[second.key]["turn"].unique().tolist() == [-1]
    assert by_key[second.key]["sampled_logprob"].isnan().all()  # unknown is not 0
    assert {name: column.dtype for name, column in by_key[first.key].items()} == {
        name: torch.from_numpy(np.full(1, COLUMNS[name])).dtype for name in NAMES
    }


def test_columns_of_a_users_own_move_too_and_bad_ones_are_refused() -> None:
    token_T, trained_T = np.arange(4, dtype=np.int32), np.ones(4, bool)
    own = Example(token_T, trained_T, {"surprise": np.array([9.0, 1.0, 2.0, 3.0])})
    assert packed_batch([own]).columns_N["surprise"].tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(ValueError, match="column 'surprise' is missing"):
        packed_batch([own, Example(token_T, trained_T)])
    with pytest.raises(ValueError, match="3 values for the 4 tokens"):
        packed_batch([Example(token_T, trained_T, {"advantage": np.ones(3)})])
    for name, value, message in (("temperature", 0.0, "temperature"), ("weight", -1.0, "weight")):
        with pytest.raises(ValueError, match=message):
            packed_batch([Example(token_T, trained_T, {name: np.full(4, value)})])
    greedy_prompt = {"temperature": np.array([0.0, 0.0, 1.0, 1.0])}  # of tokens that are not trained
    assert packed_batch([Example(token_T, token_T > 1, greedy_prompt)]).trained_tokens == 2


def test_an_idle_batch_has_everything_but_tokens_to_train() -> None:
    batch = with_columns(packed_batch(sampled_examples([9, 5])), ["weight", "turn"])
    assert batch.columns_N["weight"].tolist() == [1.0] * batch.trained_tokens
    none = idle(batch)
    assert none.trained_tokens == none.real_tokens == 0
    assert {len(column) for column in none.columns_N.values()} == {0}
    assert none.forward is batch.forward


@pytest.mark.parametrize("packs", [True, False])
def test_t22_padding_may_be_the_stop_token(packs: bool) -> None:
    """A sampled stop token is trained, and which token fills up changes nothing."""
    model = core_model()
    model.use_packing(packs)
    stop = 7
    examples = []
    for example in sampled_examples([9, 14, 5]):
        token_T = example.token_T.copy()
        token_T[-1] = stop
        examples.append(replace(example, token_T=token_T))
    found = []
    for pad_token in (stop, 0):
        if packs:
            batch = packed_batch(examples, shape=Shape(64, 32), pad_token=pad_token)
        else:
            batch = padded_batch(examples, pad_token=pad_token)
        assert int((batch.target_N == stop).sum()) >= 3
        found.append(model.outputs(batch).logprob_N)
    assert torch.equal(*found)


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 64), max_size=60))
def test_bins_hold_every_sequence_once_and_never_too_much(lengths: list[int]) -> None:
    bins = best_fit(lengths, 64)
    assert sorted(number for some in bins for number in some) == list(range(len(lengths)))
    assert all(sum(lengths[number] for number in some) <= 64 for some in bins)
    # Any two bins that would fit into one would have been one.
    rooms = sorted(sum(lengths[number] for number in some) for some in bins)
    assert len(rooms) < 2 or rooms[0] + rooms[1] > 64


def test_a_sequence_that_fits_nowhere_is_refused() -> None:
    with pytest.raises(ValueError, match="65 tokens does not fit into 64"):
        best_fit([65], 64)


def test_keys_say_where_an_example_comes_from() -> None:
    examples = sampled_examples([4, 6])
    batch = padded_batch(examples)
    assert batch.keys == [ExampleKey("train", 0, 0, 0), ExampleKey("train", 0, 0, 1)]
