"""Python values in a table of DuckDB."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

from rollbook.data.columns import column, insert
from rollout_rows import rollout, write_rows

COMMAND = """
import sys
from rollbook.cli.main import main
try:
    main(sys.argv[1:])
finally:
    print("pandas" in sys.modules)
"""


def test_values_come_back_and_none_is_null() -> None:
    connection = duckdb.connect()
    connection.execute("create table t (i bigint, f double, s varchar, b boolean)")
    rows = [(1, 0.5, "é\0😀", True), (None, None, None, None), (-(2**62), 0.0, "", False)]
    for some in (rows, [], rows[1:2]):
        columns = [list(values) for values in zip(*some, strict=True)] or [[], [], [], []]
        kinds = {"i": int, "f": float, "s": str, "b": bool}
        named = zip(kinds.items(), columns, strict=True)
        insert(connection, "t", {name: column(values, kind) for (name, kind), values in named})
    assert connection.execute("from t").fetchall() == [*rows, rows[1]]


@pytest.mark.parametrize("words", [["profile"], ["rl"], ["sft"]], ids=lambda words: words[0])
def test_commands_do_without_pandas(tmp_path: Path, words: list[str]) -> None:
    """Half a second before the first row is read."""
    write_rows(
        tmp_path / "in.jsonl", [rollout(f"t{number // 2}", number % 2, number % 2) for number in range(4)]
    )
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "data", *words, "in.jsonl", "-o", "out.jsonl"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "False", done.stdout
