"""`data filter`: which rows stay, and that every other row is accounted for."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from rollbook.cli.main import main
from rollbook.data.filter import filter_rows
from rollbook.data.job import DataJob
from rollbook.errors import BadLineError, UsageError, WriteError

LINES = [
    '{"reward": 0.9,  "n": 1}',
    '{"reward": 0.1, "n": 2}',
    '{"n": 3}',
    '{"reward": "0.95", "n": 4}',
    '{"reward": 0.8, "text": "\\ud83d\\ude00 \u2028", "n": 5}',
    '{"reward": NaN, "n": 6}',
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(LINES) + "\n")
    return path


def test_rows_are_kept_byte_for_byte_and_the_others_counted(source: Path, tmp_path: Path) -> None:
    rejected = tmp_path / "bad.jsonl"
    manifest = filter_rows([source], tmp_path / "good.jsonl", where="reward >= 0.8", rejected=rejected)
    assert (tmp_path / "good.jsonl").read_text().split("\n") == [LINES[0], LINES[4], ""]
    assert rejected.read_text().split("\n") == [LINES[1], LINES[2], LINES[3], LINES[5], ""]
    assert manifest.counts == {"dropped": 1, "unanswerable": 3}
    assert manifest.rows_in == manifest.rows_out + sum(manifest.counts.values())
    assert manifest.details == {"first_places": [f"{source}:{line}" for line in (3, 4, 6)]}
    assert json.loads((tmp_path / "bad_manifest.json").read_text())["rows_out"] == 4
    assert json.loads((tmp_path / "good_manifest.json").read_text())["rows_out"] == 2


def test_both_files_appear_or_neither(source: Path, tmp_path: Path) -> None:
    source.write_text(source.read_text() + '{"reward": 1} {"reward": 2}\n')
    before = set(tmp_path.iterdir())
    with pytest.raises(BadLineError, match=r"in\.jsonl:7"):
        filter_rows([source], tmp_path / "a.jsonl", where="reward > 0", rejected=tmp_path / "b.jsonl")
    assert set(tmp_path.iterdir()) == before
    with pytest.raises(UsageError, match="names of their own"):
        filter_rows([source], tmp_path / "a.jsonl", where="reward > 0", rejected=tmp_path / "a.jsonl")


def test_an_output_that_cannot_be_finished_takes_the_other_with_it(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"reward": 1}\n{"reward": 0, "twice": 1, "twice": 2}\n')
    with pytest.raises(WriteError, match=r"bad\.parquet: these rows do not fit"):
        filter_rows([source], tmp_path / "good.jsonl", where="reward > 0", rejected=tmp_path / "bad.parquet")
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize(
    ("where", "lines"),
    [
        ("reward >= 0.8", [1, 5]),
        ("reward < 0.5 or row.n = 3", [2, 3]),
        ("not (reward < 0.5)", [1, 5]),
        ("row.n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)", [1, 2, 3, 4, 5, 6]),
        ("row.n % 2 = 0", None),
        ("(row.n)::int % 2 = 0", [2, 4, 6]),
        ("row.reward > 0.5", [1, 4, 5]),
        ("row.text is not null and row->>'text' like '%😀%'", [5]),
        ("reward = (select max(reward) from rollouts)", [1]),
        ("reward > 0.5 -- and no more", [1, 5]),
        ("row->>'reward' = '0.95'", [4]),
        ("true", [1, 2, 3, 4, 5, 6]),
    ],
)
def test_conditions_are_sql(source: Path, tmp_path: Path, where: str, lines: list[int] | None) -> None:
    if lines is None:
        with pytest.raises(UsageError, match="need to add explicit type casts"):
            filter_rows([source], tmp_path / "out.jsonl", where=where)
        return
    filter_rows([source], tmp_path / "out.jsonl", where=where)
    kept = (tmp_path / "out.jsonl").read_text().split("\n")
    assert kept == [*(LINES[line - 1] for line in lines), ""]


def test_the_order_of_many_files_is_kept(tmp_path: Path) -> None:
    names = [f"{number:02d}" for number in range(30)]
    for name in names:
        (tmp_path / f"{name}.jsonl").write_text(f'{{"id": "{name}"}}\n' * 3)
    listed = ", ".join(f"'{name}'" for name in names[::2])
    filter_rows([tmp_path], tmp_path / "out" / "even.jsonl", where=f"task_id in ({listed})")
    kept = [json.loads(line)["id"] for line in (tmp_path / "out" / "even.jsonl").read_text().splitlines()]
    assert kept == [name for name in names[::2] for _ in range(3)]


@pytest.mark.parametrize(
    "where",
    ["1) , (2", "true) from rollouts where (false", "true) limit (1", "true); select (1", "", "select 1"],
)
def test_what_is_no_condition_is_refused(source: Path, tmp_path: Path, where: str) -> None:
    with pytest.raises(UsageError):
        filter_rows([source], tmp_path / "out.jsonl", where=where)
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize(
    ("where", "hint"),
    [
        ("n > 1", "n is a field and no column; write row.n"),
        ("rewrd > 1", "near it: reward (rollouts"),
        ("row.rewrd > 1", "did you mean row.reward?"),
        ("has(reward)", "in SQL: x is not null"),
        ("reward == null", "in SQL: x is null"),
        ('row.text = "hi"', "write texts in single quotes"),
        ("matches(row.text, 'h')", "in SQL: regexp_matches(x, 'pattern')"),
        ("reward", "it is 0.9, neither true nor false"),
        ("read_text('/etc/passwd') is null", "table function"),
        ("exists (select 1 from read_text('/etc/passwd'))", "is not for queries"),
    ],
)
def test_a_mistake_says_what_to_type(source: Path, tmp_path: Path, where: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        filter_rows([source], tmp_path / "out.jsonl", where=where)
    assert hint in str(caught.value)
    assert list(tmp_path.iterdir()) == [source]


def test_a_condition_without_an_answer_is_a_mistake(source: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"could not be evaluated on any row \(first: .*in\.jsonl:1"
    ) as caught:
        filter_rows([source], tmp_path / "good.jsonl", where="row.rewrd >= 0.8")
    assert "fields of the first row: reward, n" in str(caught.value)
    assert list(tmp_path.iterdir()) == [source]
    assert filter_rows([source], tmp_path / "none.jsonl", where="reward > 5").rows_out == 0


def test_a_queue_that_ends_it_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM ends a command as Ctrl-C does: what was written aside goes."""
    before = signal.getsignal(signal.SIGTERM)

    def killed(*_: object) -> None:
        assert len(list(tmp_path.iterdir())) > 1
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(DataJob, "write", killed)
    with pytest.raises(SystemExit) as ended:
        main(["data", "filter", str(source), "--where", "reward > 0", "-o", str(tmp_path / "x.jsonl")])
    assert ended.value.code == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == [source]
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_command(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = tmp_path / "good.jsonl.zst"
    with pytest.raises(SystemExit) as ended:
        main(["data", "filter", str(source), "--where", "reward >= 0.8", "-o", str(good)])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert f"{good}: 2 rows, from 6" in printed
    assert "unanswerable 3" in printed
    assert f"unanswerable: {source}:4" in printed
    with pytest.raises(SystemExit) as ended:
        main(["data", "filter", str(source), "--where", "rewrd > 2", "-o", str(tmp_path / "x.jsonl")])
    assert ended.value.code == 2
    assert 'Referenced column "rewrd" not found' in capsys.readouterr().err
