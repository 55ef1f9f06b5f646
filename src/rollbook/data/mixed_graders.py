"""Says where the rewards of a dataset come from different graders, and keeps pairs from comparing them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rollbook.data.job import DataJob
from rollbook.errors import UsageError
from rollbook.query.connection import Kept
from rollbook.records.graders import Grader, differences

DIFFERENT_GRADERS = "different_graders"  # in the details of a manifest: what differs, a text for each
_SEVERAL = -1
_SHOWN = 5
# A file with rows of several graders does not say which row is whose.
_CROSSING = f"""
    select count(*) from pairs
    join kept better on better.n = chosen join kept worse on worse.n = rejected
    join graders one on one.file = better.file join graders other on other.file = worse.file
    where one.grader <> other.grader or one.grader = {_SEVERAL}
"""


def note_different_graders(job: DataJob) -> None:
    """Put what differs between the graders of the inputs into the manifest; the command warns of it."""
    if listed := list(_differences(job)):
        job.manifest.details[DIFFERENT_GRADERS] = listed


def refuse_pairs_across_graders(job: DataJob, table: Kept) -> None:
    """Refuse pairs whose answers were graded by different graders, as far as the manifests say."""
    graders = job.manifest.graders
    numbers = {path: _number(own, graders) for path, own in job.graders.items() if own}
    if len(graders) < 2:
        return
    files = np.array([str(path.absolute()) for path in numbers], dtype=object)
    table.add("graders", file=files, grader=np.array([*numbers.values()], dtype=np.int64))
    if count := table.one(_CROSSING)[0]:
        found = table.one("select count(*) from pairs")[0]
        listed = "\n  ".join(_differences(job))
        raise UsageError(
            f"{count} of {found} pairs would compare the rewards of different graders:\n  {listed}\n"
            "Grade all rollouts with one grader (rollbook data reverify), or pair them as they are with "
            "--allow-different-graders"
        )


def _number(own: list[Grader], graders: list[Grader]) -> int:
    if len(own) > 1:
        return _SEVERAL
    return next(place for place, one in enumerate(graders) if not differences(one, own[0]))


def _differences(job: DataJob) -> Iterator[str]:
    """What each further grader has that differs from the first one, and the first file it is found in."""
    known = [(path, one) for path, graders in job.graders.items() for one in graders]
    seen: list[Grader] = []
    for path, one in known:
        if all(differences(one, other) for other in seen):
            if seen and len(seen) <= _SHOWN:
                yield f"{_between(known[0][0], path)}: {', '.join(differences(seen[0], one))}"
            seen.append(one)
    if len(seen) > _SHOWN + 1:
        yield f"and {len(seen) - _SHOWN - 1} more graders"


def _between(first: Path, path: Path) -> str:
    return f"within {path}" if first == path else f"{first} -> {path}"


def warning_of(details: dict[str, Any]) -> str | None:
    """What to tell of it; None where all rewards are of one grader, or nothing says."""
    if not (listed := details.get(DIFFERENT_GRADERS)):
        return None
    return "the rewards were given by different graders:\n  " + "\n  ".join(listed)
