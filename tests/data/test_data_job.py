"""The ground every command over datasets stands on: inputs, rows, an output that is whole, a manifest."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.data.job import DataJob
from rollbook.errors import BadFileError, BadLineError, LockedError, RollbookError, UsageError, WriteError
from rollbook.records.datasets import manifest_path
from rollbook.records.rows import RowCount, read_rows

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


def test_the_manifest_says_how_it_was_made(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ROWS)
    copied(source, tmp_path / "out.jsonl.zst")
    manifest = json.loads((tmp_path / "out_manifest.json").read_text())
    assert (manifest["command"], manifest["directory"]) == ("copy", str(Path.cwd()))
    assert manifest["inputs"] == [
        {
            "path": str(source),
            "bytes": source.stat().st_size,
            "xxh3_128": xxhash.xxh3_128(source.read_bytes()).hexdigest(),
            "rows": 10,
        }
    ]
    assert manifest["rows_in"] == manifest["rows_out"] == 10
    written = (tmp_path / "out.jsonl.zst").read_bytes()
    assert manifest["output_bytes"] == len(written)
    assert manifest["output_xxh3_128"] == xxhash.xxh3_128(written).hexdigest()


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".parquet"])
def test_every_digest_is_that_of_the_file(tmp_path: Path, ending: str) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ROWS)
    copied(source, tmp_path / f"a{ending}")
    copied(tmp_path / f"a{ending}", tmp_path / f"b{ending}")
    first, second = (json.loads((tmp_path / f"{name}_manifest.json").read_text()) for name in "ab")
    assert second["inputs"][0]["xxh3_128"] == first["output_xxh3_128"]
    assert second["inputs"][0]["bytes"] == first["output_bytes"]


MORE = b'{"_rb_key":"late#0"}\n{"_rb_key":"la'


def test_what_is_appended_while_it_is_read_does_not_count(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ROWS)
    before = source.read_bytes()
    with DataJob("copy", [source], tmp_path / "out.jsonl") as job:
        for number, row in enumerate(job.rows()):
            job.write(row.data)
            if number == 3:
                source.write_bytes(before + MORE)
        assert len(list(job.rows())) == 10
    assert (tmp_path / "out.jsonl").read_bytes() == before
    (record,) = job.manifest.inputs
    assert (record.bytes, record.rows) == (len(before), 10)
    assert record.xxh3_128 == xxhash.xxh3_128(before).hexdigest()


@pytest.mark.parametrize("what", ["replaced", "rewritten", "cut", "removed"])
def test_an_input_that_changes_meanwhile_is_an_error(tmp_path: Path, what: str) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ROWS)
    other = write_jsonl(tmp_path / "other.jsonl", ROWS)
    with (
        pytest.raises(RollbookError, match=r"in\.jsonl was changed while it was read; nothing is written"),
        DataJob("copy", [source], tmp_path / "out.jsonl") as job,
    ):
        rows = [row.data for row in job.rows()]
        if what == "replaced":
            other.replace(source)
        elif what == "removed":
            source.unlink()
        else:
            source.write_bytes(b'{"_rb_key":"x#0"}\n' * (1 if what == "cut" else 1000))
        for data in rows:
            job.write(data)
        if what == "rewritten":
            list(job.rows())
    assert not (tmp_path / "out.jsonl").exists()


def test_an_error_leaves_nothing_behind(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ROWS)
    with pytest.raises(ZeroDivisionError), DataJob("copy", [source], tmp_path / "out.jsonl") as job:
        job.write(b"{}")
        1 / 0  # noqa: B018
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_an_output_is_never_written_over(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ROWS)
    (tmp_path / "out.jsonl").write_text("precious")
    with pytest.raises(UsageError, match="exists; choose another name or add --overwrite"):
        copied(source, tmp_path / "out.jsonl")
    with pytest.raises(UsageError, match="is an input as well"):
        copied(source, source)
    assert (tmp_path / "out.jsonl").read_text() == "precious"


def test_a_second_command_with_the_same_output_is_refused(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ROWS)
    with DataJob("slow", [source], tmp_path / "out.jsonl") as job:
        with pytest.raises(LockedError, match="is being written by this process"):
            copied(source, tmp_path / "out.jsonl")
        job.write(b"{}")
    assert values(tmp_path / "out.jsonl") == [{}]
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("taken", ["a", "b"])
def test_two_outputs_appear_together_or_not_at_all(tmp_path: Path, taken: str) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ROWS)
    with (
        pytest.raises(WriteError, match=rf"{taken}\.jsonl: not written.*another program created it"),
        DataJob("two", [source], tmp_path / "a.jsonl", extra_outputs=[tmp_path / "sub" / "b.jsonl"]) as job,
    ):
        for row in job.rows():
            job.outputs[row.number % 2].write(row.data)
        place = tmp_path / ("sub" if taken == "b" else "") / f"{taken}.jsonl"
        place.write_text("somebody else's")
    assert place.read_text() == "somebody else's"
    files = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert files == sorted(["in.jsonl", place.name])


def test_a_failed_command_leaves_what_it_was_to_replace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ROWS)
    copied(source, tmp_path / "out.jsonl")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    link = Path.hardlink_to

    def killed_at_the_last(self: Path, target: Path) -> None:
        if self.name == "out.jsonl.link":
            raise KeyboardInterrupt
        link(self, target)

    monkeypatch.setattr(Path, "hardlink_to", killed_at_the_last)
    with (
        pytest.raises(KeyboardInterrupt),
        DataJob("again", [source], tmp_path / "out.jsonl", overwrite=True) as job,
    ):
        job.write(b"{}")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


KILLED = """
import os, signal, sys
from pathlib import Path
from rollbook.data.job import DataJob
with DataJob("slow", ["in.jsonl"], Path("out.jsonl"), overwrite=True) as job:
    (job.scratch / "run-1").write_bytes(b"x" * 1000)
    for row in job.rows():
        job.write(row.data)
    job.outputs[0].finish()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_command_left_is_cleared_by_the_next(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ROWS)
    for _ in range(2):
        subprocess.run([sys.executable, "-c", KILLED], cwd=tmp_path, check=False)
        left = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "in.jsonl"]
        assert {path.name for path in left} <= {"out.jsonl", "run-1", ".out.jsonl.lock"}
        assert not (tmp_path / "out.jsonl").exists()
    copied(source, tmp_path / "out.jsonl")
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl", "out_manifest.json"}


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
