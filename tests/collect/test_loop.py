"""How often Python searches for garbage while rollouts run."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from rollbook.collect.loop import seldom_collecting_garbage


@pytest.fixture
def thresholds() -> Iterator[tuple[int, int, int]]:
    before = gc.get_threshold()
    yield before
    gc.set_threshold(*before)


def test_searched_seldom_meanwhile_and_as_before_afterwards(thresholds: tuple[int, int, int]) -> None:
    with pytest.raises(KeyError), seldom_collecting_garbage():
        assert gc.get_threshold() == (20_000, *thresholds[1:])
        raise KeyError
    assert gc.get_threshold() == thresholds


@pytest.mark.parametrize("wanted", [0, 50_000], ids=["off", "less often still"])
def test_what_somebody_chose_is_kept(thresholds: tuple[int, int, int], wanted: int) -> None:
    gc.set_threshold(wanted, 5, 5)
    with seldom_collecting_garbage():
        assert gc.get_threshold() == (wanted, 5, 5)
    assert gc.get_threshold() == (wanted, 5, 5)
