"""Which iterations of a run can be taken again: those to which the record leads from kept weights."""

from __future__ import annotations

from rollbook.errors import RollbookError, UsageError
from rollbook.rl.replay.recorded import Origin, RecordedRun
from rollbook.rl.replay.replayer import OtherWeightsError, Replayer


def origin_of(run: RecordedRun, i: int) -> Origin:
    """The newest kept weights from which the record leads to iteration i; a UsageError where none do."""
    run.record(i)
    origin = max(
        (origin for origin in run.origins() if origin.iteration <= i), key=lambda origin: origin.iteration
    )
    for number in range(origin.iteration, i + 1):
        if why := run.missing(number):
            raise _refusal(run, i, f"from {origin.name} on, {why}")
    return origin


def check_way(run: RecordedRun, first: int, last: int) -> None:
    """Refuse a range of iterations before the first step is taken, not after hours."""
    origin_of(run, first)
    for i in range(first, last + 1):
        if why := run.missing(i):
            raise _refusal(run, i, why)


def only_iteration(run: RecordedRun, i: int | None) -> int:
    """The iteration that is asked for; a run of one need not be asked."""
    if i is None and len(run.iterations) == 1:
        return run.iterations[0]
    if i is None:
        raise UsageError(f"{run.root} has {len(run.iterations)} iterations; say which one")
    run.record(i)
    return i


def open_replayer(run: RecordedRun, i: int) -> Replayer:
    """A replayer that is just before iteration i, or on the way to it."""
    origin = origin_of(run, i)
    try:
        return Replayer(run, origin)
    except OtherWeightsError as error:
        raise _refusal(run, i, str(error), without_initial=True) from None
    except UsageError as error:
        if origin.directory is not None:
            raise
        raise _refusal(run, i, str(error), without_initial=True) from None


def stand_before(run: RecordedRun, i: int) -> Replayer:
    """A replayer with the weights that iteration i began with; an error where the way there differs."""
    replayer = open_replayer(run, i)
    while replayer.at < i:
        replayed = replayer.next()
        if replayed.first is not None:
            raise RollbookError(
                f"the weights before iteration {i} are not those of the run: {replayed.first}"
            )
    return replayer


def _refusal(run: RecordedRun, i: int, why: str, *, without_initial: bool = False) -> UsageError:
    near = _reachable(run, without_initial=without_initial)
    text = f"iteration {i} of {run.root} cannot be replayed: {why}"
    if not near:
        return UsageError(f"{text}; no other can either")
    nearest = min(near, key=lambda other: abs(other - i))
    return UsageError(f"{text}; the nearest that can is --iteration {nearest}")


def _reachable(run: RecordedRun, *, without_initial: bool) -> list[int]:
    kept = {
        origin.iteration for origin in run.origins() if not (without_initial and origin.directory is None)
    }
    found: list[int] = []
    for i in run.iterations:
        leads_here = i in kept or (bool(found) and found[-1] == i - 1)
        if leads_here and run.missing(i) is None:
            found.append(i)
    return found
