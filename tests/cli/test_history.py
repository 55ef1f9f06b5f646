"""`rollbook history` on terminals of any width, and what its options mean."""

from __future__ import annotations

import csv
import io
import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from helpers import preloaded
from helpers.screen import on_a_terminal
from rollbook.runs.jobs.ledger import Ledger, RunEnd, RunStart, Status

DONE = {"ok": 10, "expected": 100, "reward_mean": 0.45, "last_loss": 1.234, "steps": 12345}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    record(tmp_path, 3)
    return tmp_path


def record(directory: Path, count: int, **fields: str) -> None:
    ledger = Ledger(directory / "artifacts")
    for number in range(count):
        git = {"sha": "0123456789", "dirty": True}
        run = ledger.start(RunStart(name=f"a-long-name-of-a-run-{number}", kind="collect", git=git, **fields))
        note = "stopped because of many words of a reason"
        end = RunEnd(status=Status.INTERRUPTED, metrics=DONE, reason=note, duration_s=3661.0)
        end.checkpoint = {"path": "x", "step": 98765}
        ledger.end(run, end)


def history(directory: Path, *words: str, code: int = 0) -> str:
    done = preloaded.run("rollbook", "history", *words, cwd=directory)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("columns", [40, 80, 100, 132, 200, 300])
def test_what_is_shown_is_shown_whole(columns: int, project: Path) -> None:
    shown = re.sub(r"\x1b\[[0-9;]*m", "", on_a_terminal("history", directory=project, columns=columns))
    head, *lines = shown.splitlines()
    names = head.split()
    whole = {"reward": "0.45", "loss": "1.234", "rollouts": "10/100", "steps": "12345", "git": "01234567+"}
    for record in Ledger(project / "artifacts").records():
        (line,) = [line for line in lines if record.id in line]  # never cut
        assert "interrupted" in line
        for name in whole.keys() & set(names):
            assert whole[name] in line.split(), name
    left = re.search(r"not wide enough for (.*?); --json and --csv have them", shown)
    said = set(left[1].split(", ")) if left else set()
    assert said | set(names) == {*whole, "id", "status", "kind", "started", "took", "checkpoint", "note"}
    if columns >= 80:
        assert all(len(line) <= columns for line in lines if "wide enough" not in line)
        assert {"reward", "loss"} <= set(names)
    assert bool(said) == (columns < 200)


def test_json_and_csv_have_every_run_and_a_table_says_what_it_has_not(tmp_path: Path) -> None:
    record(tmp_path, 25)
    assert len(json.loads(history(tmp_path, "--json"))) == 25
    assert len(list(csv.DictReader(io.StringIO(history(tmp_path, "--csv"))))) == 25
    assert "5 more; --limit 0 shows all" in history(tmp_path)
    assert len(json.loads(history(tmp_path, "--json", "--limit", "3"))) == 3


def test_an_empty_history_says_how_to_begin(tmp_path: Path) -> None:
    said = history(tmp_path)
    assert "no run yet" in said and "rollbook run NAME -- COMMAND" in said
    assert "without options" not in said


def test_options_that_match_nothing(project: Path) -> None:
    assert "no run matches; `rollbook history` without options" in history(project, "--kind", "rl")


def test_since(tmp_path: Path) -> None:
    midnight = datetime.now().astimezone().replace(hour=0, minute=0, second=0, microsecond=0)
    for moment in (midnight, midnight - timedelta(hours=12), midnight - timedelta(days=9)):
        record(tmp_path, 1, started_at=moment.astimezone(UTC).isoformat())
    for since, count in (("today", 1), ("yesterday", 2), ("2d", 2), ("900h", 3), ("1999-12-31", 3)):
        assert len(json.loads(history(tmp_path, "--since", since, "--json"))) == count, since


def test_since_something_that_is_no_time(project: Path) -> None:
    assert "--since 'last week' is not a time; write 2026-01-31" in history(
        project, "--since", "last week", code=2
    )
    assert len(json.loads(history(project, "--since", "2020-01-01", "--json"))) == 3
