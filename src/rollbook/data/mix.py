"""Several sources in exact shares: sampled uniformly without replacement, named, shuffled, reproducible.

Only the rows that are taken are read; the rest of a source is looked at for its newlines. What is taken goes
through an external sort by random numbers, so neither the sources nor the mix need fit into memory. The usual
script loads everything, takes `min(k, len)` and so changes the shares silently; here a source with too few
rows is an error until a policy is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from rollbook.data.external_sort import shuffled
from rollbook.data.job import DataJob
from rollbook.data.places import RowPlaces, permutation
from rollbook.data.progress import NO_PROGRESS, Progress
from rollbook.data.shares import Shortfall, Source, parse_sources, plan_counts
from rollbook.records.datasets import DataManifest
from rollbook.records.rows import Row
from rollbook.runs.resolve import Inputs, find_inputs


def mix(
    sources: Sequence[str],
    output: Path,
    *,
    total: int | None = None,
    seed: int = 0,
    shortfall: Shortfall = Shortfall.ERROR,
    source_key: str = "source",
    overwrite: bool = False,
    progress: Progress = NO_PROGRESS,
) -> DataManifest:
    """Write the mix of `name=path[,path...]:share` sources; without a total, as large as the shares allow."""
    parsed = parse_sources(sources)
    found = {source.name: find_inputs(source.words) for source in parsed}
    paths = {path.resolve(): path for inputs in found.values() for path in inputs.paths}
    skipped = [file for inputs in found.values() for file in inputs.skipped]
    arguments = {"sources": list(sources), "total": total, "shortfall": shortfall, "source_key": source_key}
    with DataJob(
        "mix",
        Inputs(list(paths.values()), skipped),
        output,
        arguments=arguments,
        seed=seed,
        overwrite=overwrite,
        progress=progress,
    ) as job:
        places = [
            RowPlaces(job, [paths[path.resolve()] for path in found[source.name].paths]) for source in parsed
        ]
        counts = plan_counts(parsed, [source.rows for source in places], total, shortfall)
        rows = chain.from_iterable(
            _sampled(source.name, of, count, seed, source_key)
            for source, of, count in zip(parsed, places, counts, strict=True)
        )
        for data in shuffled(job.scratch, rows, permutation(sum(counts), seed, "order")):
            job.write(data)
        if repeated := sum(max(0, count - of.rows) for of, count in zip(places, counts, strict=True)):
            job.count("repeated", repeated)
        if total is not None and sum(counts) < total:
            job.count("short_of_total", total - sum(counts))
        job.manifest.details["sources"] = [
            _report(source, of.rows, count) for source, of, count in zip(parsed, places, counts, strict=True)
        ]
    return job.manifest


def _sampled(name: str, places: RowPlaces, count: int, seed: int, source_key: str) -> Iterator[bytes]:
    """A source's part of the mix: where it asks for more rows than there are, all of them again and again."""
    whole_passes, rest = divmod(count, places.rows)
    everything = np.arange(places.rows)
    sample = np.sort(permutation(places.rows, seed, name, "sample")[:rest])
    for numbers in [*[everything] * whole_passes, sample]:
        for row in places.read(numbers):
            yield _with_source(row, source_key, name)


def _with_source(row: Row, key: str, name: str) -> bytes:
    """The row's own bytes with one more field at the end; our keys stay in front."""
    value = row.value()
    if key in value:
        if value[key] == name:
            return row.data
        raise row.error(
            f"has a {key!r} of its own, {value[key]!r}; name another field with --source-key",
        )
    field = orjson.dumps({key: name})[1:]
    return row.data.rstrip()[:-1] + (b"," if value else b"") + field


def _report(source: Source, available: int, taken: int) -> dict[str, Any]:
    return {
        "name": source.name,
        "share": float(source.share),
        "available": available,
        "taken": taken,
        "used": round(taken / available, 6),
    }
