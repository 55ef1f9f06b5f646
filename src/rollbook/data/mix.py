"""Several sources in exact shares: sampled uniformly without replacement, named, shuffled, reproducible.

Only the rows that are taken are read; the rest of a source is looked at for its newlines. What is taken goes
through an external sort by random numbers, so neither the sources nor the mix need fit into memory. The usual
script loads everything, takes `min(k, len)` and so changes the shares silently; here a source with too few
rows is an error until a policy is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from rollbook.data.external_sort import ExternalSort
from rollbook.data.job import DataJob, DataManifest
from rollbook.data.row_index import Found, RowIndex
from rollbook.data.scratch import scratch_beside
from rollbook.data.shares import Shortfall, Source, parse_sources, plan_counts
from rollbook.data.shuffle import chosen_blocks, numbers_of, row_blocks, stream
from rollbook.records.rows import Progress
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
    advance: Progress = lambda _: None,
) -> DataManifest:
    """Write the mix of `name=path[,path...]:share` sources; without a total, as large as the shares allow."""
    parsed = parse_sources(sources)
    found = {source.name: find_inputs(source.words) for source in parsed}
    paths = {path.resolve(): path for inputs in found.values() for path in inputs.paths}
    arguments = {"sources": list(sources), "total": total, "shortfall": shortfall, "source_key": source_key}
    skipped = [file for inputs in found.values() for file in inputs.skipped]
    every = Inputs(list(paths.values()), skipped)
    job = DataJob("mix", every, output, arguments=arguments, seed=seed, overwrite=overwrite)
    with job, scratch_beside(output) as directory:
        indexes = {
            name: RowIndex([paths[path.resolve()] for path in inputs.paths], directory, advance)
            for name, inputs in found.items()
        }
        counts = plan_counts(parsed, [indexes[source.name].rows for source in parsed], total, shortfall)
        shuffled = ExternalSort(directory)
        taken = 0
        for source, count in zip(parsed, counts, strict=True):
            index = indexes[source.name]
            for place, row in _sampled(source, index, count, seed):
                shuffled.add(place, taken, _with_source(row, source_key, source.name, index))
                taken += 1
            if count > index.rows:
                job.count("repeated", count - index.rows)
            for file in index.files:
                job.set_rows(file.path, file.rows, file.blank)
        for _, _, data in shuffled.ordered():
            job.write(data)
        job.manifest.details["sources"] = [
            _report(source, indexes[source.name].rows, count)
            for source, count in zip(parsed, counts, strict=True)
        ]
        if total is not None and sum(counts) < total:
            job.count("short_of_total", total - sum(counts))
    return job.manifest


def _sampled(source: Source, index: RowIndex, count: int, seed: int) -> Iterator[tuple[int, Found]]:
    """The rows of a source's sample, each with its random place in the mix.

    More rows than there are is every row, over and over, and a sample for the rest.
    """
    whole_passes, rest = divmod(count, index.rows)
    sample = chosen_blocks(stream(seed, source.name, "sample"), index.rows, rest)
    for turn in range(whole_passes + 1):
        order = stream(seed, source.name, "order", str(turn))
        for block in row_blocks(index.rows) if turn < whole_passes else sample:
            yield from zip(numbers_of(order, block).tolist(), index.read([block]), strict=True)


def _with_source(row: Found, key: str, name: str, index: RowIndex) -> bytes:
    """The row's own bytes with one field more at the end; our keys stay in front."""
    if key in row.value:
        if row.value[key] == name:
            return row.data
        raise index.refuse(
            row.number,
            f"has a {key!r} of its own, {row.value[key]!r}; name another field with --source-key",
        )
    field = orjson.dumps({key: name})[1:]
    return row.data.rstrip()[:-1] + (b"," if row.value else b"") + field


def _report(source: Source, available: int, taken: int) -> dict[str, Any]:
    return {
        "name": source.name,
        "share": float(source.share),
        "available": available,
        "taken": taken,
        "used": round(taken / available, 6),
    }
