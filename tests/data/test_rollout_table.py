"""The narrow table numbers rows as our reader counts them, whatever happens to the files meanwhile."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollbook.data.job import DataJob
from rollbook.data.rollout_table import rollout_table, rows_at
from rollbook.query.connection import Kept
from rollbook.query.session import Session
from rollbook.runs.resolve import rows_of
from rollout_rows import rollout, write_rows


def shards(directory: Path) -> list[Path]:
    return [
        write_rows(directory / f"{name}.jsonl", [rollout(name, repeat, repeat / 10) for repeat in range(5)])
        for name in "cab"
    ]


def numbered(paths: list[Path]) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """The number and key of every row, by the table and by our reader."""
    with (
        DataJob("x", paths) as job,
        rollout_table(job, "key") as table,
    ):
        numbers = table.numbers("select n from kept")
        read = [(number, row.value()["_rb_key"]) for number, row in rows_at(job, numbers)]
        return list(table.ask("select n, key from kept order by n")), read


def test_rows_are_numbered_in_the_order_of_the_files(tmp_path: Path) -> None:
    by_table, by_reader = numbered(shards(tmp_path))
    assert by_table == by_reader
    assert [key[0] for _, key in by_table] == list("cccccaaaaabbbbb")


def test_the_columns_of_rollouts_keep_the_order_of_rows(tmp_path: Path) -> None:
    """A join would not; DuckDB makes one of `in` with a list of more than a few values."""
    (path, *_) = shards(tmp_path)
    session = Session(rows_of({path: path.stat().st_size}), values=[["reward"]], in_order=True)
    plan = str(list(session.run("explain select * from rollouts").batches))
    assert "JSON" in plan.upper() and "JOIN" not in plan.upper()


def test_a_later_file_may_be_scanned_before_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = Session.keep

    def out_of_order(self: Session, sql: str, table: str) -> Kept:
        return keep(self, f"{sql} ORDER BY file DESC, key", table)

    monkeypatch.setattr(Session, "keep", out_of_order)
    by_table, by_reader = numbered(shards(tmp_path))
    assert by_table == by_reader
    assert [key[0] for _, key in by_table] == list("cccccaaaaabbbbb")


@pytest.mark.parametrize("more", [b'{"_rb_key":"new#0"}\n', b'{"_rb_key":"new#0"}\n{"_rb_ke'])
def test_what_is_appended_meanwhile_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: bytes
) -> None:
    """A collection that goes on: the job reads what was there when it began."""
    paths = shards(tmp_path)
    keep = Session.keep

    def append_and_keep(*given: Any) -> Kept:
        with paths[0].open("ab") as file:
            file.write(more)
        return keep(*given)

    monkeypatch.setattr(Session, "keep", append_and_keep)
    by_table, by_reader = numbered(paths)
    assert by_table == by_reader
    assert len(by_table) == 15 and "new#0" not in dict(by_table).values()


COMMAND = """
import sys
from rollbook.cli.main import main
try:
    main(sys.argv[1:])
finally:
    print("pandas" in sys.modules)
"""


@pytest.mark.parametrize("words", [["profile"], ["rl"], ["sft"]], ids=lambda words: words[0])
def test_commands_do_without_pandas(tmp_path: Path, words: list[str]) -> None:
    """Half a second before the first row is read."""
    rows = [rollout(f"t{number // 2}", number % 2, number % 2) for number in range(4)]
    (tmp_path / "in.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "data", *words, "in.jsonl", "-o", "out.jsonl"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "False", done.stdout
