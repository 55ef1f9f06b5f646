"""Random numbers from (seed, position, token): exponential, independent, 64 bits of seed, a long tail."""

from __future__ import annotations

import math

import pytest
import torch

from rollbook.samplers.noise import exponential, of_bits, seed_words, token_words


def draws(seeds: list[int], positions: list[int], vocabulary: int) -> torch.Tensor:
    words = torch.tensor([seed_words(seed) for seed in seeds], dtype=torch.int32)
    return exponential(words, torch.tensor(positions), token_words(vocabulary))


def chi_square_is_small(counts: torch.Tensor) -> bool:
    """Within five standard deviations of what equal shares give."""
    expected = float(counts.sum()) / len(counts)
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return abs(statistic - (len(counts) - 1)) < 5 * math.sqrt(2 * (len(counts) - 1))


def uniforms(values: torch.Tensor) -> torch.Tensor:
    return -torch.expm1(-values.double())


@pytest.mark.parametrize("varied", ["seed", "high seed", "position", "token"])
def test_numbers_are_exponential_along_every_direction(varied: str) -> None:
    count = 200_000
    if varied == "token":
        values = draws([7], [3], count)[0]
    else:
        numbers = range(count)
        seeds = {"seed": list(numbers), "high seed": [n << 40 for n in numbers], "position": [7] * count}[
            varied
        ]
        values = draws(seeds, list(numbers) if varied == "position" else [3] * count, 1)[:, 0]
    assert abs(float(values.mean()) - 1) < 0.02
    assert chi_square_is_small(torch.histc(uniforms(values).float(), bins=64, min=0, max=1))


@pytest.mark.parametrize("bit", [0, 1, 16, 31, 32, 61])
def test_neighbours_have_nothing_in_common(bit: int) -> None:
    """Pairs of numbers whose seeds differ in one bit fill the square evenly; so do neighbouring positions."""
    seeds = [number * 6364136223846793005 % 2**62 for number in range(300)]
    first = draws(seeds, [5] * 300, 300).flatten()
    for other in (
        draws([seed ^ (1 << bit) for seed in seeds], [5] * 300, 300).flatten(),
        draws(seeds, [6] * 300, 300).flatten(),
        first.view(300, 300).roll(1, dims=1).flatten(),
    ):
        places = (uniforms(first) * 8).long() * 8 + (uniforms(other) * 8).long()
        assert chi_square_is_small(torch.bincount(places, minlength=64).double())


def test_no_two_seeds_share_their_words() -> None:
    """62-bit seeds that agree in their low, or high, or folded 32 bits give different numbers."""
    base = 0x2ABC_DEF0_1234_5678
    seeds = [base, base ^ (1 << 40), base ^ (1 << 61), base ^ 1, (base >> 32) | (base & 0xFFFFFFFF) << 32]
    assert len({seed_words(seed) for seed in seeds}) == len(seeds)
    values = draws(seeds, [0] * len(seeds), 1000)
    for one in range(len(seeds)):
        for other in range(one):
            assert (values[one] == values[other]).float().mean() < 0.01


def test_a_seed_has_64_bits() -> None:
    with pytest.raises(ValueError, match="2\\^64"):
        seed_words(2**64)
    with pytest.raises(ValueError, match="-1"):
        seed_words(-1)


def test_a_token_10_nats_down_is_drawn_as_often_as_it_should() -> None:
    count, gap = 1_000_000, 10.0
    words = torch.tensor([seed_words(11)], dtype=torch.int32).expand(count, 2)
    race = torch.tensor([1.0, math.exp(-gap)]) / exponential(words, torch.arange(count), token_words(2))
    expected = count * math.exp(-gap) / (1 + math.exp(-gap))
    assert abs(int(race.argmax(-1).sum()) - expected) < 4 * math.sqrt(expected)


def test_numbers_keep_their_precision_down_to_22_nats() -> None:
    """Noise that bottoms out at 2^-24 never draws a token 17 nats down (T27)."""
    h = torch.cat([torch.arange(1000), 2 ** torch.arange(31), 2**31 - 2 ** torch.arange(31)]).to(torch.int32)
    exact = -torch.log1p(-(h.double() + 0.5) / 2**31)
    assert float(of_bits(h[:1])) < math.exp(-22)
    likely = exact < 10  # beyond, a float32 is too coarse to tell u from 1, and nothing is decided
    assert torch.allclose(of_bits(h)[likely].double(), exact[likely], rtol=1e-3, atol=0)


def test_numbers_are_finite_and_never_zero() -> None:
    """Zero would make a token win always, infinity lose even when it is alone."""
    ends = of_bits(torch.tensor([0, 2**31 - 1], dtype=torch.int32))
    assert ((ends > 0) & torch.isfinite(ends)).all()
