"""The files of a token export after a kill: cut back by a resume, they go on as if nothing had been."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.token_exports import Export
from rollbook.records import token_writers
from rollbook.records.token_columns import ALL_COLUMNS
from rollbook.records.token_files import export_files, plan_rewind, read_manifest
from rollbook.records.token_places import token_source
from rollbook.records.token_writers import open_token_writer
from rollbook.records.tokens import TokenSequence


def sequences(root: Path) -> list[TokenSequence]:
    return [sequence for piece in token_source(root).pieces() for sequence in piece.read()]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("torn", [0, 1, 100, 5000, None])
def test_a_writer_killed_in_the_middle_of_a_write(tmp_path: Path, kind: Any, torn: int | None) -> None:
    """`torn`: how many bytes of the iteration that no manifest names were written when it was killed."""
    export = Export(kind=kind, part=2, iterations=3)
    export.write(tmp_path / "living", is_open=True)
    shutil.copytree(tmp_path / "living", tmp_path / "killed", ignore=shutil.ignore_patterns(".*"))
    files = export_files(tmp_path / "killed", export.settings)
    ends = {part.file: part.end for step in read_manifest(files.manifest) for part in step.ranks}
    for rank in range(export.processes):
        path = files.lines_of(rank) if kind == "jsonl" else files.part_of(rank, 2, ".arrows")
        end = ends[path.name if kind == "jsonl" else path.with_suffix(".parquet").name]
        assert path.stat().st_size > end + 5000
        if torn is not None:
            with path.open("r+b") as file:
                file.truncate(end + torn)
    before = rows_of(sequences(tmp_path / "killed"))
    assert before == rows_of(sequences(written(tmp_path / "whole", export)))
    plan = plan_rewind(files, batch=3)
    assert plan.dropped == []
    for path, length in plan.lengths.items():
        with path.open("r+b") as file:
            file.truncate(length)
    for rank in range(export.processes):
        open_token_writer(files, export.settings, rank).close()
    assert rows_of(sequences(tmp_path / "killed")) == before
    assert not list(files.directory.glob("*.arrows"))


def written(root: Path, export: Export) -> Path:
    export.write(root)
    return root


def rows_of(found: list[TokenSequence]) -> list[tuple[Any, ...]]:
    return sorted(
        (
            sequence.iteration,
            sequence.rank or 0,
            sequence.export_sequence_idx or 0,
            sequence.text,
            columns_of(sequence),
        )
        for sequence in found
    )


def columns_of(sequence: TokenSequence) -> str:
    return repr(
        [(name, None if (one := sequence.get(name)) is None else one.tolist()) for name in ALL_COLUMNS]
    )


@given(
    runs=st.lists(
        st.tuples(st.sampled_from([0.5, -0.25, 0.0, -0.0, 1 / 3, np.nan, np.inf]), st.integers(1, 200)),
        min_size=1,
        max_size=8,
    ),
    cuts=st.sets(st.integers(1, 1599), max_size=6),
)
def test_a_json_column_of_few_runs_is_what_each_value_alone_gives(
    runs: list[tuple[float, int]], cuts: set[int]
) -> None:
    """Rows end inside of runs, and runs go on over rows."""
    flat_F = np.concatenate([np.full(length, value, np.float32) for value, length in runs])
    bounds = sorted({0, len(flat_F), *(cut for cut in cuts if cut < len(flat_F))})
    rows = token_writers._rows_of(flat_F, bounds)
    alone = [orjson.dumps(flat_F[start:end].tolist()) for start, end in pairwise(bounds)]
    text = [orjson.loads(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY)) for row in rows]
    assert [np.array(row, np.float32).tobytes() for row in text] == [
        np.array(orjson.loads(row), np.float32).tobytes() for row in alone
    ]


@pytest.mark.parametrize("batch", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_rewind_leaves_what_the_checkpoint_holds(tmp_path: Path, kind: Any, batch: int) -> None:
    export = Export(kind=kind, part=1, iterations=3)
    files = export.write(tmp_path)
    plan = plan_rewind(files, batch=batch)
    for path in plan.dropped:
        path.unlink()
    for path, length in plan.lengths.items():
        with path.open("r+b") as file:
            file.truncate(length)
    assert {sequence.iteration for sequence in sequences(tmp_path)} == set(range(batch))


def test_large_rows_end_a_row_group_of_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow.parquet as pq

    monkeypatch.setattr("rollbook.records.token_writers._BYTES_OF_A_GROUP", 1)
    files = Export(kind="parquet", iterations=4, part=4).write(tmp_path)
    with pq.ParquetFile(files.part_of(0, 0)) as file:
        assert file.num_row_groups == 4  # a batch each
    found = [s.get("token_ids") for s in sequences(tmp_path)]
    assert len(found) == 4 * 2 * 4 and all(isinstance(ids, np.ndarray) for ids in found)


def test_reading_parquet_keeps_one_row_group_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow as pa

    monkeypatch.setattr("rollbook.records.token_writers._BYTES_OF_A_GROUP", 1)  # a group for each iteration
    most = {}
    for iterations in (2, 20):
        root = tmp_path / str(iterations)
        export = Export(
            kind="parquet", iterations=iterations, part=iterations, processes=1, records=16, tokens=1000
        )
        export.write(root)
        before = pa.total_allocated_bytes()
        (piece,) = [piece for piece in token_source(root).pieces() if piece.iteration == 0]
        held = [pa.total_allocated_bytes() - before for _ in piece._replace(iteration=None).read()]
        assert len(held) == 16 * iterations
        most[iterations] = max(held)
    assert most[20] < 1.5 * most[2]
