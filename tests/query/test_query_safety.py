"""A query reads the named files and can do nothing else, whatever it tries."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pytest

from helpers.sample_run import SampleConfig, write_sample_run
from rollbook.errors import RollbookError, UsageError
from rollbook.query.guard import parsed
from rollbook.query.session import Session


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("safety") / "run"
    write_sample_run(path, config=SampleConfig(iterations=2))
    return path


def contents(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


READING = [
    "select 1",
    "from metrics",
    "with a as (select 1) select * from a",
    "with recursive t(i) as (select 1 union all select i + 1 from t where i < 3) select * from t",
    "describe rollouts",
    "summarize rollouts",
    "show tables",
    "explain select * from rollouts",
    "explain analyze select count(*) from rollouts",
    "pivot rollouts on split in ('train') using avg(reward) group by iteration",
    "select list_transform([1, 2], lambda x: x + 1), * from range(3)",
    "select *, row_number() over (partition by run order by step) as n from metrics qualify n = 1",
    "-- a comment\nselect distinct on (run) * from metrics order by step desc;",
    "select 'copy (select 1) to x' as \"COPY_QUERY_NODE\"",
]


@pytest.mark.parametrize("sql", READING)
def test_what_reads_is_taken(run: Path, sql: str) -> None:
    assert Session([run]).run(sql).columns


COPY = "copy (select 1) to '{file}' (format csv, use_tmp_file false)"
NOT_READING = [
    COPY,
    "with a as (" + COPY + ") select * from a",
    "select * from (with a as (" + COPY + ") select * from a)",
    "explain analyze " + COPY,
    "explain analyze with a as (" + COPY + ") select * from a, metrics",
    "explain (analyze) with a as (" + COPY + ") select * from a, metrics",
    "select 1; " + COPY,
    "attach '{directory}/x.db'",
    "install httpfs",
    "load httpfs",
    "set enable_external_access = true",
    "reset lock_configuration",
    "pragma version",
    "create table x (a int)",
    "drop view metrics",
    "insert into runs values ('x')",
    "with a as (delete from runs returning *) select * from a",
    "export database '{directory}/x'",
    "call pragma_version()",
    "prepare p as select 1",
    "select * from read_csv('/etc/passwd')",
    "select * from READ_TEXT('{file}')",
    "describe select * from read_csv('/etc/passwd')",
    "select * from '/etc/passwd'",
    "select * from '{file}'",
    "select * from glob('{directory}/*')",
    "select * from read_json('https://example.invalid/x.json')",
    "",
    "   ;",
]


@pytest.mark.parametrize("sql", NOT_READING)
def test_what_does_more_is_refused(run: Path, sql: str) -> None:
    before = contents(run)
    typed = sql.format(file=run / "metrics.jsonl", directory=run)
    with pytest.raises(UsageError):
        Session([run]).run(typed)
    assert contents(run) == before


def test_sql_inside_a_function_is_not_run(run: Path) -> None:
    before = contents(run)
    inner = f"with a as ({COPY.format(file=run / 'metrics.jsonl')}) select * from a".replace("'", "''")
    row = duckdb.execute(f"select json_serialize_sql('{inner}')").fetchone()
    assert row is not None
    serialized = row[0].replace("'", "''")
    for sql in (
        f"select * from json_execute_serialized_sql('{serialized}'), metrics",
        f"select * from query('{inner}'), metrics",
    ):
        with pytest.raises(UsageError, match="is not for queries"):
            Session([run]).run(sql)
    assert contents(run) == before


def test_the_lock_holds_without_the_check(run: Path) -> None:
    """The second line of defence: what a check of the text might miss, the connection refuses."""
    session, sql = Session([run]), "select * from metrics"
    connection, _ = session._connect(sql, session.files(sql), with_names=False)
    for sql in (
        "select * from read_csv('/etc/passwd')",
        f"select * from read_text('{run}/config.json')",
        f"copy (select 1) to '{run}/new.csv'",
        f"attach '{run}/x.db'",
        "install httpfs",
        "load httpfs",
        "set memory_limit = '8GB'",
        "set enable_external_access = true",
    ):
        with pytest.raises(duckdb.Error):
            connection.execute(sql)


def test_variables_of_the_caller_are_not_tables(run: Path) -> None:
    secret = duckdb.sql("select 1 as x")
    assert secret.columns == ["x"]
    with pytest.raises(UsageError, match="no view 'secret'"):
        Session([run]).relation("select * from secret")


def test_memory_is_capped(run: Path) -> None:
    sql = "select count(*) from (select i, random() as r from range(2000000) t(i) order by r, i)"
    assert [list(batch) for batch in Session([run], memory="100MB").run(sql).batches] == [[(2000000,)]]
    hungry = "select length(string_agg(repeat('x', 1000), '')) from range(1000000)"
    with pytest.raises(RollbookError, match="needs more than --memory 60MB"):
        Session([run], memory="60MB").run(hungry)
    with pytest.raises(UsageError, match="--memory lots"):
        Session([run], memory="lots").run("select 1")


def test_a_statement_comes_back_without_its_comments() -> None:
    assert parsed("/* a */ select 1 ;")[0].strip().startswith("select 1")
