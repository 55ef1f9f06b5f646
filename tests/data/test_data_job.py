"""The ground every command over datasets stands on: inputs, rows, an output that is whole, a manifest."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import orjson
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.data import job as job_module
from rollbook.data.job import DataJob
from rollbook.errors import BadFileError, BadLineError, UsageError
from rollbook.records.datasets import manifest_path
from rollbook.records.rows import RowCount, read_rows
from supervision import is_gone

ROWS: list[dict[str, Any]] = [
    {
        "_rb_key": f"t{number}#0",
        "reward": number / 10,
        "text": "line\u2028separator \\frac{1}{2}",
        "deep": {"a": [number]},
    }
    for number in range(10)
]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return path


def copied(source: Path, target: Path) -> DataJob:
    with DataJob("copy", [source], target) as job:
        for row in job.rows():
            job.write(row.data)
    return job


def values(path: Path) -> list[dict[str, Any]]:
    return [row.value() for row in read_rows(path)]


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.zst", ".jsonl.gz", ".parquet"])
def test_rows_survive_every_format(tmp_path: Path, ending: str) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ROWS)
    job = copied(source, tmp_path / f"out{ending}")
    assert values(tmp_path / f"out{ending}") == ROWS
    assert job.manifest.rows_in == job.manifest.rows_out == len(ROWS)
    assert copied(tmp_path / f"out{ending}", tmp_path / "back.jsonl")
    assert values(tmp_path / "back.jsonl") == ROWS


def test_parquet_takes_a_field_of_the_last_row_and_of_several_types(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"id": number, "answer": number} for number in range(3000)]
    rows += [{"id": 3000, "answer": "a word", "late": {"x": 1}}]
    copied(write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.parquet")
    back = values(tmp_path / "out.parquet")
    assert [row["id"] for row in back] == [row["id"] for row in rows]
    assert back[-1]["late"] == {"x": 1}
    assert [row["answer"] for row in back] == [row["answer"] for row in rows]


@pytest.mark.parametrize("many_bytes", [1, 1 << 30])
def test_the_manifest_says_how_it_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, many_bytes: int
) -> None:
    """The digest may come from a copy of this process."""
    monkeypatch.setattr(job_module, "_MANY_BYTES", many_bytes)
    source = write_jsonl(tmp_path / "in.jsonl", ROWS)
    copied(source, tmp_path / "out.jsonl")
    manifest = json.loads((tmp_path / "out_manifest.json").read_text())
    assert manifest["command"] == "copy"
    assert manifest["inputs"] == [
        {
            "path": str(source),
            "bytes": source.stat().st_size,
            "xxh3_128": xxhash.xxh3_128(source.read_bytes()).hexdigest(),
            "rows": 10,
        }
    ]
    assert manifest["rows_in"] == manifest["rows_out"] == 10


def test_an_error_leaves_nothing_behind(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ROWS)
    with pytest.raises(ZeroDivisionError), DataJob("copy", [source], tmp_path / "out.jsonl") as job:
        job.write(b"{}")
        1 / 0  # noqa: B018
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_an_error_leaves_no_process_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_module, "_MANY_BYTES", 1)
    monkeypatch.setattr(job_module, "_digest", lambda _: time.sleep(60))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    source = write_jsonl(tmp_path / "in.jsonl", ROWS)
    pids: list[int | None] = []
    with pytest.raises(ZeroDivisionError), DataJob("copy", [source], tmp_path / "out.jsonl") as job:
        pids += [copy._pid for copy in job._hashing._copies]
        1 / 0  # noqa: B018
    assert len(pids) == 1
    assert all(pid and is_gone(pid) for pid in pids)


def test_an_output_is_never_written_over(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ROWS)
    (tmp_path / "out.jsonl").write_text("precious")
    with pytest.raises(UsageError, match="exists; choose another name or add --overwrite"):
        copied(source, tmp_path / "out.jsonl")
    with pytest.raises(UsageError, match="is an input as well"):
        copied(source, source)
    assert (tmp_path / "out.jsonl").read_text() == "precious"


def test_of_two_commands_with_one_output_only_one_takes_the_name(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ROWS)
    with (
        pytest.raises(UsageError, match="was made by another command meanwhile"),
        DataJob("slow", [source], tmp_path / "out.jsonl") as job,
    ):
        copied(source, tmp_path / "out.jsonl")
        job.write(b"{}")
    assert values(tmp_path / "out.jsonl") == ROWS
    assert json.loads((tmp_path / "out_manifest.json").read_text())["command"] == "copy"
    assert len(list(tmp_path.iterdir())) == 3


def test_a_manifest_does_not_outlive_the_file_it_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ROWS)
    copied(source, tmp_path / "out.jsonl")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(job_module, "write_atomic", killed)
    with (
        pytest.raises(KeyboardInterrupt),
        DataJob("again", [source], tmp_path / "out.jsonl", overwrite=True) as job,
    ):
        job.write(b"{}")
    assert values(tmp_path / "out.jsonl") == [{}]
    assert not (tmp_path / "out_manifest.json").exists()


def test_the_manifest_of_a_collection_is_not_taken(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rollouts.jsonl", ROWS)
    (tmp_path / "rollouts_manifest.json").write_text('{"input": "tasks.jsonl"}')
    with pytest.raises(UsageError, match="belongs to another file"):
        copied(source, tmp_path / "rollouts.parquet")


def test_bad_rows_are_named(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2}\n[3]\n')
    seen = RowCount()
    with pytest.raises(BadLineError, match=r"in.jsonl:4: not a JSON object"):
        [row.value() for row in read_rows(path, count=seen)]
    assert (seen.rows, seen.blank) == (3, 1)
    path.write_text('{"a": 1}\n{"a": 2')
    with pytest.raises(BadLineError, match=r"in.jsonl:2: not valid JSON"):
        values(path)
    path.write_text('{"a": 1}\n{"a": 2}')
    assert values(path) == [{"a": 1}, {"a": 2}]


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    for name in ("a.parquet", "a.jsonl.zst"):
        (tmp_path / name).write_bytes(b"nonsense")
        with pytest.raises(BadFileError, match=name):
            values(tmp_path / name)


def test_manifest_names() -> None:
    assert manifest_path(Path("x/train.jsonl.zst")).name == "train_manifest.json"
    assert manifest_path(Path("train.parquet")).name == "train_manifest.json"


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(st.dictionaries(st.text(max_size=8), JSON, max_size=4), max_size=8), block=st.booleans())
def test_compressed_lines_hold_any_rows(
    rows: list[dict[str, Any]], block: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rows = [row for row in rows if "_nonfinite" not in row]
    directory = tmp_path_factory.mktemp("any")
    plain = [orjson.loads(orjson.dumps(row)) for row in rows]
    copied(write_jsonl(directory / "in.jsonl", plain), directory / "out.jsonl.zst")
    assert values(directory / "out.jsonl.zst") == plain
