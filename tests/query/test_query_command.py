"""The command: what it prints, writes and refuses."""

from __future__ import annotations

import csv
import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from collecting import ROLLBOOK
from rollbook.cli.main import main
from rollbook.query.schema import COLUMNS

BY_ITERATION = "select iteration, count(*) as n, avg(reward) as mean from rollouts group by all order by all"


def query(*words: str | Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["query", *map(str, words)])
    assert ended.value.code == 0


def refused(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["query", *map(str, words)])
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_a_table_says_how_many_rows_there_are(sample_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    query(BY_ITERATION, sample_run)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["iteration", "n", "mean"]
    assert lines[1].split()[:2] == ["0", "48"]
    assert lines[-1] == "(21 rows)"
    query("select run, file from rollouts", sample_run)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 42
    assert lines[-1] == "(showing 40 of 648 rows; use --format csv or -o FILE for all)"
    query("select * from metrics limit 1", sample_run)
    assert "columns; use --format csv" in capsys.readouterr().out


def test_hostile_text_is_shown_and_not_obeyed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "\x1b]0;owned\x07 [bold]not bold[/bold] \u202egnp"
    row = {"task_id": text, "reward": 1.0}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    query('select task_id, task_id as "\x1b[31mred" from rollouts', tmp_path / "rows.jsonl")
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\u202e" not in out
    assert "<U+001B>]0;owned" in out and "[bold]not bold[/bold]" in out


def test_formats(sample_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    query(BY_ITERATION, sample_run, "--json")
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 21
    assert rows[0]["n"] == 48
    query(BY_ITERATION, sample_run, "--format", "jsonl")
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == rows
    query(BY_ITERATION, sample_run, "--format", "csv")
    read = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [float(row["mean"]) for row in read] == [row["mean"] for row in rows]
    first = "order by iteration, split, group_idx, traj_idx limit 1"
    query(f"select run, run, metrics, tags, 'NaN'::double as odd from rollouts {first}", sample_run, "--json")
    (row,) = json.loads(capsys.readouterr().out)
    assert list(row) == ["run", "run_1", "metrics", "tags", "odd"]
    assert row["metrics"].keys() == {"correct", "format_parse"}  # those of its turns
    assert (row["tags"], row["odd"]) == (["mental"], None)
    query("select 1 where false", sample_run, "--json")
    assert json.loads(capsys.readouterr().out) == []


def test_integers_of_128_bits_keep_their_digits(
    sample_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    most = 2**127 - 1
    sql = f"select {most}::hugeint as n, [{-most}::hugeint] as l, map {{{most}::hugeint: 1.5::double}} as m"
    query(sql, sample_run, "--json")
    assert json.loads(capsys.readouterr().out) == [{"n": most, "l": [-most], "m": {str(most): 1.5}}]
    query(sql, sample_run, "--format", "csv")
    assert capsys.readouterr().out.splitlines()[1].startswith(f"{most},[-{most}],")
    query(f"select {most}::hugeint as n", sample_run, "-o", tmp_path / "n.parquet")
    assert pq.read_table(tmp_path / "n.parquet")["n"].to_pylist() == [most]
    capsys.readouterr()
    sql = f"select {most}::uhugeint as n"
    assert "cast it" in refused(capsys, sql, sample_run, "-o", tmp_path / "u.parquet")


@pytest.mark.parametrize("ending", ["csv", "json", "jsonl", "parquet"])
def test_files(sample_run: Path, tmp_path: Path, ending: str, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "new" / f"out.{ending}"
    query("select *, row from rollouts", sample_run, "-o", output)
    assert "648 rows" in capsys.readouterr().err
    if ending == "parquet":
        table = pq.read_table(output)
        assert table.num_rows == 648
        assert str(table.schema.field("reward").type) == "double"
    elif ending == "json":
        assert len(json.loads(output.read_text())) == 648
    else:
        assert len(output.read_text().splitlines()) == 648 + (ending == "csv")
    assert "exists; choose another name" in refused(capsys, "select 1", sample_run, "-o", output)
    query("select 1", sample_run, "-o", output, "--overwrite")
    stem = "out" if ending in ("jsonl", "parquet") else output.name
    assert sorted(path.name for path in output.parent.iterdir()) == sorted(
        [output.name, f"{stem}_manifest.json"]
    )


def test_an_output_that_fails_leaves_nothing(
    sample_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "nope" in refused(capsys, "select nope from rollouts", sample_run, "-o", tmp_path / "x.csv")
    assert list(tmp_path.iterdir()) == []
    assert "the query is empty" in refused(capsys, " ", sample_run)
    assert "the ending says nothing" in refused(capsys, "select 1", sample_run, "-o", tmp_path / "x.txt")
    metrics = sample_run / "metrics.jsonl"
    assert "one of the files" in refused(capsys, "select 1", sample_run, "-o", metrics, "--overwrite")


def test_the_query_from_a_file_and_from_stdin(
    sample_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "q.sql").write_text(f"-- how it went\n{BY_ITERATION};\n")
    query("--file", tmp_path / "q.sql", sample_run)
    from_file = capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.StringIO(BY_ITERATION))
    query("-", sample_run)
    assert capsys.readouterr().out == from_file


def test_the_schema(sample_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    query("--schema")
    out = capsys.readouterr().out
    for view, columns in COLUMNS.items():
        assert f"{view}: one row is" in out
        assert all(column.meaning in out for column in columns)
    query("--schema", sample_run, "--json")
    metrics = json.loads(capsys.readouterr().out)["metrics"]["columns"]
    assert {"name": "env/all/reward/total", "type": "DOUBLE", "meaning": ""} in metrics


def test_errors_say_what_to_type(sample_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unknown = refused(capsys, "select rewardd from rollouts", sample_run)
    assert 'Referenced column "rewardd"' in unknown
    assert "near it: reward (rollouts, steps, tokens)" in unknown
    assert "rollbook query --schema" in unknown
    assert '"env/all/reward/total" (metrics)' in refused(capsys, "select total from metrics", sample_run)
    assert "did you mean rollouts?" in refused(capsys, "select * from rolloutz", sample_run)
    assert "the query comes first" in refused(capsys, sample_run, "select 1")
    assert "no path" in refused(capsys, "select 1")
    assert "add -o FILE.parquet" in refused(capsys, "select 1", sample_run, "--format", "parquet")
    assert "choose one of" in refused(capsys, "select 1", sample_run, "--format", "xml")


def test_ctrl_c(sample_run: Path) -> None:
    sql = "select count(*) from range(100000000000) t(i) where hash(i) % 7 = 1"
    process = subprocess.Popen(
        [*ROLLBOOK, "query", sql, str(sample_run)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        time.sleep(2)  # into the query itself; earlier it would end in the same way
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert printed == ""  # nor a progress bar of DuckDB's own


def test_the_list_of_commands_does_not_load_duckdb() -> None:
    code = (
        "import sys; from rollbook.cli.main import main; main(['--help']); assert 'duckdb' not in sys.modules"
    )
    assert (
        "query"
        in subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    )
    code = "import sys, rollbook.runs.reader; assert 'duckdb' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
