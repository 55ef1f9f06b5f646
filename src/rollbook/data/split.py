"""Train, validation and so on, so that no task is in two of them: repeats never straddle.

Shares are exact over tasks, to the nearest whole task. Every task has a seeded hash; the tasks in the order
of their hashes are cut at the shares, so that a task's place depends on the seed and on which tasks there
are, and not on the order of the rows. What is held is the hash of each row, eight bytes.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np

from rollbook.data.job import DataJob
from rollbook.data.progress import NO_PROGRESS, Progress
from rollbook.data.rollout_table import rollout_table, rows_at, rows_with
from rollbook.data.shares import counts_of
from rollbook.errors import UsageError
from rollbook.query.connection import Kept
from rollbook.query.sql import literal
from rollbook.records.datasets import ENDINGS, DataManifest
from rollbook.records.field_paths import field_path, json_path


def split(
    inputs: Sequence[str | Path],
    shares: Mapping[str, float],
    directory: Path,
    *,
    by: str = "task",
    seed: int = 0,
    overwrite: bool = False,
    progress: Progress = NO_PROGRESS,
) -> DataManifest:
    """`shares` names each part, with or without an ending; `by` is `task`, `row`, or a field."""
    _check(shares)
    outputs = [directory / (name if name.endswith(ENDINGS) else f"{name}.jsonl") for name in shares]
    with (
        DataJob(
            "split",
            inputs,
            outputs[0],
            extra_outputs=outputs[1:],
            arguments={"shares": dict(shares), "by": by},
            seed=seed,
            overwrite=overwrite,
            progress=progress,
        ) as job,
        rollout_table(job, _group(by)) as table,
    ):
        hashes = array("Q", _hashes(job, table, by, seed))
        groups = np.unique(np.frombuffer(hashes, dtype=np.uint64))
        counts = _counts(len(groups), shares, by)
        ends = np.cumsum(counts)[:-1]
        starts = groups[ends].tolist()  # the first hash of every part but the first
        for row, value in rows_with(job, hashes):
            job.outputs[bisect_right(starts, value)].write(row.data)
        job.manifest.details = {
            name: {"share": share, f"{by}s" if by in ("task", "row") else "groups": count, "rows": part.rows}
            for (name, share), count, part in zip(shares.items(), counts, job.outputs, strict=True)
        }
    return job.manifest


def parse_shares(words: Sequence[str]) -> tuple[list[str], dict[str, float]]:
    """The words of the command line: inputs, and parts written `train=0.9`."""
    inputs: list[str] = []
    shares: dict[str, float] = {}
    for word in words:
        name, mark, share = word.rpartition("=")
        try:
            number = float(share) if mark else None
        except ValueError:
            number = None
        if number is None or Path(word).exists():
            inputs.append(word)
        elif name in shares:
            raise UsageError(f"{word}: {name} is named twice")
        else:
            shares[name] = number
    return inputs, shares


def _check(shares: Mapping[str, float]) -> None:
    if len(shares) < 2:
        raise UsageError("a split has two parts or more, such as train=0.9 val=0.1")
    for name, share in shares.items():
        if not name or "/" in name or name.startswith("."):
            raise UsageError(f"{name!r} is no name of a part; the directory is named with -o")
        if not 0 < share < 1:
            raise UsageError(f"{name}={share:g}: a share is between 0 and 1")
    if abs(sum(shares.values()) - 1) > 1e-6:
        raise UsageError(f"the shares add up to {sum(shares.values()):g}, not to 1")


def _group(by: str) -> str:
    """The column by which rows stay together; null for a row that has none."""
    if by in ("task", "row"):
        return "task_id" if by == "task" else "'' AS part"
    return f"nullif((row->{literal(json_path(field_path(by)))})::VARCHAR, 'null') AS part"


def _hashes(job: DataJob, table: Kept, by: str, seed: int) -> Iterator[int]:
    column = "task_id" if by == "task" else "part"
    for number, part in table.ask(f"select n, {column} from kept order by n"):
        if part is None:
            [(_, row)] = rows_at(job, np.array([number]))
            hint = f"`data filter --where 'row.{by} is not null'` leaves it out"
            raise row.error(f"no {by}, which the split is by; {hint}")
        yield _hash(part.encode(errors="surrogatepass") if by != "row" else b"%d" % number, seed)


def _hash(group: bytes, seed: int) -> int:
    digest = hashlib.blake2b(group, digest_size=8, key=str(seed).encode()).digest()
    return int.from_bytes(digest, "little")


def _counts(groups: int, shares: Mapping[str, float], by: str) -> list[int]:
    """How many groups go to each part, within one of its share."""
    if not groups:
        raise UsageError("there are no rows to split")
    exact = [Fraction(str(share)) for share in shares.values()]
    counts = counts_of(groups, [share / sum(exact) for share in exact])
    for (name, share), count in zip(shares.items(), counts, strict=True):
        if count == 0:
            kind = by if by in ("task", "row") else f"{by} value"
            raise UsageError(f"{name}={share:g} of {groups} {kind}s is none; choose other shares")
    return counts
