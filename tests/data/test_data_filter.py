"""`data filter`: which rows stay, and that every other row is accounted for."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from rollbook.cli.main import main
from rollbook.data.expression import Expression
from rollbook.data.filter import filter_rows
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
    assert manifest.details["unanswerable"] == {
        "reward is missing": 2,
        "reward 0.8: text against a number": 1,
    }
    assert manifest.details["first_places"][0] == f"{source}:3: reward is missing"
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


def test_a_condition_that_no_row_answers_is_a_slip(source: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"not one row answers this: .*in\.jsonl:1: rewrd is missing"
    ) as caught:
        filter_rows([source], tmp_path / "good.jsonl", where="rewrd >= 0.8")
    assert "the fields of the last row: reward, n" in str(caught.value)
    assert list(tmp_path.iterdir()) == [source]
    assert filter_rows([source], tmp_path / "none.jsonl", where="reward > 5").rows_out == 0


def test_a_queue_that_ends_it_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM ends a command as Ctrl-C does: what was written aside goes."""
    before = signal.getsignal(signal.SIGTERM)

    def killed(*_: object) -> bool:
        assert any(path.name.endswith(".tmp") for path in tmp_path.iterdir())
        os.kill(os.getpid(), signal.SIGTERM)
        return True

    monkeypatch.setattr(Expression, "answer", killed)
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
    assert f"{source}:4: reward 0.8: text against a number" in printed
    with pytest.raises(SystemExit) as ended:
        main(["data", "filter", str(source), "--where", "rewrd(1) > 2", "-o", str(tmp_path / "x.jsonl")])
    assert ended.value.code == 2
    assert "\n  rewrd(1) > 2\n  ^\nfunctions: abs" in capsys.readouterr().err
