"""Train, validation and so on, so that no task is in two of them: repeats never straddle.

Shares are exact over tasks, to the nearest whole task. Every task has a seeded hash; the tasks in the order
of their hashes are cut at the shares, so that a task's place depends on the seed and on which tasks there
are, and not on the order of the rows. What is held is the hash of each row, eight bytes, and rows are parsed
once.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from rollbook.data.job import DataJob, DataManifest
from rollbook.errors import UsageError
from rollbook.records.datasets import ENDINGS
from rollbook.records.field_paths import field_path, value_at
from rollbook.records.row_keys import task_of
from rollbook.records.rows import Progress, Row

PASSES_OVER_INPUT = 2


def split(
    inputs: Sequence[str | Path],
    shares: Mapping[str, float],
    directory: Path,
    *,
    by: str = "task",
    seed: int = 0,
    overwrite: bool = False,
    advance: Progress = lambda _: None,
) -> DataManifest:
    """`shares` names each part, with or without an ending; `by` is `task`, `row`, or a field."""
    _check(shares)
    outputs = [directory / (name if name.endswith(ENDINGS) else f"{name}.jsonl") for name in shares]
    group_of = _grouping(by)
    with DataJob(
        "split",
        inputs,
        outputs[0],
        also=outputs[1:],
        arguments={"shares": dict(shares), "by": by},
        seed=seed,
        overwrite=overwrite,
        advance=advance,
    ) as job:
        hashes = array("Q")
        for number, row in enumerate(job.rows()):
            hashes.append(_hash(group_of(number, row), seed))
        groups = np.unique(np.frombuffer(hashes, dtype=np.uint64))
        counts = _whole(len(groups), shares, by)
        ends = np.cumsum(counts)[:-1]
        starts = groups[ends].tolist()  # the first hash of every part but the first
        parts = [part for part in (job.output, *job.also) if part is not None]
        for value, row in zip(hashes, job.rows(), strict=True):
            parts[bisect_right(starts, value)].write(row.data)
        job.manifest.details = {
            name: {"share": share, f"{by}s" if by in ("task", "row") else "groups": count, "rows": part.rows}
            for (name, share), count, part in zip(shares.items(), counts, parts, strict=True)
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


def _grouping(by: str) -> Callable[[int, Row], bytes]:
    if by == "task":
        return lambda _, row: task_of(row.value()).encode(errors="surrogatepass")
    if by == "row":
        return lambda number, row: str(number).encode() if row.value() is not None else b""
    path = field_path(by)

    def field(_: int, row: Row) -> bytes:
        found: Any = value_at(row.value(), path)
        if found is None:
            raise row.error(
                f"no {by}, which the split is by; `data filter --where 'row.{by} is not null'` leaves it out"
            )
        return orjson.dumps(found, option=orjson.OPT_SORT_KEYS)

    return field


def _hash(group: bytes, seed: int) -> int:
    digest = hashlib.blake2b(group, digest_size=8, key=str(seed).encode()).digest()
    return int.from_bytes(digest, "little")


def _whole(groups: int, shares: Mapping[str, float], by: str) -> list[int]:
    """Whole numbers that add up, each within one of its share: the largest remainders are rounded up."""
    if not groups:
        raise UsageError("there are no rows to split")
    wanted = [groups * share for share in shares.values()]
    counts = [int(share) for share in wanted]
    by_remainder = sorted(range(len(wanted)), key=lambda part: counts[part] - wanted[part])
    for part in by_remainder[: groups - sum(counts)]:
        counts[part] += 1
    for (name, share), count in zip(shares.items(), counts, strict=True):
        if count == 0:
            kind = by if by in ("task", "row") else f"{by} value"
            raise UsageError(f"{name}={share:g} of {groups} {kind}s is none; choose other shares")
    return counts
