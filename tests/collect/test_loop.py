"""How often Python searches for garbage while rollouts run."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator

import pytest

from rollbook.collect.loop import run_in_loop, seldom_collecting_garbage


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


def test_it_runs_beside_this_thread_also_where_a_loop_runs_already() -> None:
    async def where() -> int:
        return threading.get_ident()

    async def notebook() -> int:
        return run_in_loop(where())

    here = threading.get_ident()
    assert run_in_loop(where()) != here != asyncio.run(notebook())


def test_what_it_raises_is_raised_here() -> None:
    async def fails() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        run_in_loop(fails())
