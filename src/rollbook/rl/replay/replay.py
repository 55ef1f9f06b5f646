"""Replay: the steps of a run once more, from its record to the new weights.

    result = rollbook.replay("runs/vowels", 3)
    assert result.verdict == "equal", result.first

It begins with the newest weights that are kept before the iteration; the iterations between are taken again
too. Everything that the record says of a step is compared, in the order in which a step is made, and the
first difference is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch

from rollbook.errors import UsageError
from rollbook.rl.replay.bundle import open_recorded
from rollbook.rl.replay.findings import Difference, Verdict
from rollbook.rl.replay.reach import check_way, open_replayer, origin_of
from rollbook.rl.replay.recorded import RecordedRun
from rollbook.rl.replay.replayer import Replayed, Replayer
from rollbook.runs.random_state import capture_random_state, restore_random_state
from rollbook.train.losses import Loss

Tell = Callable[[Replayed], None]


class Replay(msgspec.Struct, kw_only=True):
    """The iterations that were taken again: those that were asked for, and those on the way to them."""

    run: str
    run_id: str | None
    verdict: Verdict
    first: Difference | None
    iterations: list[Replayed]


def replay(
    run: str | Path,
    iteration: int | range | None = None,
    *,
    loss: Loss | None = None,
    model: str | Path | None = None,
    tell: Tell = lambda _: None,
) -> Replay:
    """Take an iteration again, or a range of them, or all, and compare each with the record.

    `loss` is the run's, where that is an object of the caller's own; `model` is where its model lies now, if
    that has moved. `tell` is called with each iteration when it is done.
    """
    with undisturbed(), open_recorded(run, loss=loss, model=model) as recorded:
        first, last = span(recorded, iteration)
        found = []
        for replayed in walk(recorded, first, last):
            tell(replayed)
            found.append(replayed)
    return Replay(
        run=str(run),
        run_id=recorded.info.id if recorded.info else None,
        verdict=_worst(found),
        first=next((one.first for one in found if one.first is not None), None),
        iterations=found,
    )


def span(run: RecordedRun, iteration: int | range | None) -> tuple[int, int]:
    """The first and the last iteration that are asked for."""
    if iteration is None:
        return run.iterations[0], run.iterations[-1]
    if isinstance(iteration, int):
        return iteration, iteration
    if iteration.step != 1 or not iteration:
        raise UsageError(f"{iteration} is no range of iterations to go through one after another")
    return iteration[0], iteration[-1]


def walk(run: RecordedRun, first: int, last: int) -> Iterator[Replayed]:
    """Every iteration from kept weights before `first` on.

    A replay that has left the run's path goes on from the next weights that are kept, so that one iteration
    that differs says nothing about those after a checkpoint.
    """
    check_way(run, first, last)
    replayer: Replayer | None = None
    while replayer is None or replayer.at <= last:
        if replayer is not None and replayer.has_diverged:
            origin = origin_of(run, replayer.at)
            if origin.iteration == replayer.at:
                first, replayer = replayer.at, None  # free, before the others are loaded
        if replayer is None:
            replayer = open_replayer(run, first)
        yield replayer.next()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Leaves the random generators and the number of threads of this process as they were."""
    state, threads = capture_random_state(), torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        restore_random_state(state)


def _worst(found: list[Replayed]) -> Verdict:
    order = (Verdict.EQUAL, Verdict.WITHIN, Verdict.DIFFERS)
    return max((one.verdict for one in found), key=order.index, default=Verdict.EQUAL)
