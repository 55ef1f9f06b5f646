"""The task of a collected row has the name that `rollbook data` gives it, so that the two join."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet as pq
import pytest

from rollbook.query.output import Format, write_file
from rollbook.query.session import Session
from rollbook.records.identity import task_id
from rollbook.records.rows import read_rows


def rows(sql: str, *paths: Path) -> list[tuple[Any, ...]]:
    return [row for batch in Session(paths).run(sql).batches for row in batch]


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    return path


ASKED = {"responses_create_params": {"input": [{"role": "user", "content": "é\n1"}], "temperature": 1.0}}
SAME = {"responses_create_params": {"temperature": 1.0, "input": [{"content": "é\n1", "role": "user"}]}}
ODD = [
    {"_rb_key": "a#b#3"},
    {"_rb_key": "a#" + "1" * 19},
    {"task_id": 'quo"ted', "id": "x"},
    {"task_id": 7, "_ng_task_index": 3},
    {"_ng_task_index": 3, "id": 9},
    {"task_id": None, "id": 9},
    {"task_id": 1.5, "id": True, "prompt": "not by these"},
    {"task_id": ["a"], **ASKED},
    SAME,
    {"prompt": None, "question": "why?"},
    {"question": "why?"},
    {"reward": 1, "note": "nothing asked"},
]


@pytest.mark.parametrize("first", [0, 6])
def test_every_row_has_the_name_that_data_gives_it(tmp_path: Path, first: int) -> None:
    path = write(tmp_path / "rows.jsonl", ODD[first:] + ODD[:first])
    expected = sorted(task_id(row.value()) for row in read_rows(path))
    assert sorted(rows("select task_id from rollouts", path)) == [(name,) for name in expected]
    assert sorted(rows("select task_id from rollouts where row is not null", path)) == [
        (name,) for name in expected
    ]
    write_file(
        Session([path]),
        "select task_id from rollouts",
        tmp_path / "o.parquet",
        Format.PARQUET,
        overwrite=False,
    )
    assert sorted(pq.read_table(tmp_path / "o.parquet")["task_id"].to_pylist()) == expected


@pytest.mark.parametrize("kind", [Format.CSV, Format.PARQUET])
def test_a_row_without_a_name_far_down(tmp_path: Path, kind: Format) -> None:
    lines: list[dict[str, Any]] = [{"task_id": f"{n:01000}"} for n in range(30_000)]
    path = write(tmp_path / "rows.jsonl", [*lines, ASKED])
    sql = "select task_id from rollouts"
    assert write_file(Session([path]), sql, tmp_path / "out", kind, overwrite=False) == 30_001
    assert rows(f"{sql} order by all", path)[-1] == (task_id(ASKED),)
    assert (task_id(ASKED),) in rows(sql, path)


def test_messages_carry_the_name_of_their_row(tmp_path: Path) -> None:
    named = write(
        tmp_path / "named.jsonl", [{"task_id": "t", "messages": [{"role": "user", "content": "a"}]}]
    )
    others = write(tmp_path / "others.jsonl", [ASKED, SAME])
    found = rows("select task_id, content from transcripts order by all", named, others)
    assert found == [(task_id(ASKED), "é\n1"), (task_id(ASKED), "é\n1"), ("t", "a")]


def test_rollouts_of_others_have_a_task_each(peer_fixtures: Path) -> None:
    for path in (peer_fixtures / "nemo_gym").glob("*_rollouts.jsonl"):
        expected = {task_id(row.value()) for row in read_rows(path)}
        found = rows("select task_id from rollouts group by task_id", path)
        assert {name for (name,) in found} == expected


def test_a_result_that_outlives_the_program_is_silent(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [ASKED])
    code = (
        "from rollbook.query.session import Session\n"
        f"result = Session([{str(path)!r}]).relation('select task_id from rollouts')\n"
        "print(result.fetchall()[0][0])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (ended.stdout.strip(), ended.stderr) == (task_id(ASKED), "")
