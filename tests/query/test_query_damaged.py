"""Files with something wrong in them: a query refuses what the commands over datasets refuse."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest

from rollbook.errors import BadFileError, BadLineError
from rollbook.query.session import Session


def rows(sql: str, *paths: Path) -> list[tuple[Any, ...]]:
    return [row for batch in Session(paths).run(sql).batches for row in batch]


def compressed(text: bytes, ending: str) -> bytes:
    return gzip.compress(text) if ending == ".gz" else pa.compress(text, codec="zstd", asbytes=True)


LINES = [orjson.dumps({"task_id": n, "reward": 1, "text": f"{n * 7919}" * 20}) + b"\n" for n in range(300)]


@pytest.mark.parametrize("ending", [".zst", ".gz"])
def test_a_compressed_file_without_its_end_is_refused_by_name(tmp_path: Path, ending: str) -> None:
    whole = compressed(b"".join(LINES), ending)
    (tmp_path / "good.jsonl").write_bytes(LINES[0])
    path = tmp_path / f"cut.jsonl{ending}"
    for length in (1, 3, 5, len(whole) // 3, len(whole) * 9 // 10, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(BadFileError, match=r"cut\.jsonl"):
            rows("select count(*) from rollouts", tmp_path / "good.jsonl", path)


@pytest.mark.parametrize("ending", [".zst", ".gz"])
def test_a_compressed_file_may_have_several_parts(tmp_path: Path, ending: str) -> None:
    parts = [compressed(b"".join(LINES[start : start + 100]), ending) for start in range(0, 300, 100)]
    skipped = b"\x50\x2a\x4d\x18\x03\x00\x00\x00abc" if ending == ".zst" else b""
    path = tmp_path / f"parts.jsonl{ending}"
    path.write_bytes(skipped.join(parts))
    assert rows("select count(*), sum(reward) from rollouts", path) == [(300, 300.0)]


@pytest.mark.parametrize("end", ["", "\n"])
@pytest.mark.parametrize("bad", ['[{"task_id": "a"}]', "5", '"text"'])
@pytest.mark.parametrize("asked", ["count(*)", "count(row)", "count(distinct task_id)"])
def test_what_is_no_object_is_no_row(tmp_path: Path, bad: str, end: str, asked: str) -> None:
    for unnamed in ('{"task_id": 1}', '{"prompt": "why?"}'):
        path = tmp_path / "rows.jsonl"
        path.write_text(f"{unnamed}\n{bad}{end}")
        with pytest.raises(BadLineError, match=r"rows\.jsonl:2: not a JSON object"):
            rows(f"select {asked} from rollouts", path)


def test_a_bad_line_of_a_compressed_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"task_id": 1}\n[1]\n'))
    for asked in ("count(*)", "count(row)"):
        with pytest.raises(BadLineError, match=r"rows\.jsonl\.gz:2: not a JSON object"):
            rows(f"select {asked} from rollouts", path)


def test_blank_lines_are_no_records(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": 2}\n\n  \n{"step": 1, "late": 3}\n')
    assert rows("select step, loss, late from metrics order by step", tmp_path) == [
        (0, 2, None),
        (1, None, 3),
    ]
