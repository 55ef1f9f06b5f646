"""Text of a model with escape sequences in it: shown, whichever command prints it, and never obeyed."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from collecting import row, write_rows
from helpers.screen import ROLLBOOK, on_a_terminal
from rollbook.records.printable import ProgramOutput, csv_cell, printable_json, terminal_text
from rollbook.runs.jobs.ledger import Ledger, RunStart

TITLE, CLIPBOARD, ANSWER, BIDI, C1 = (
    "\x1b]0;owned\x07",
    "\x1b]52;c;ZXZpbA==\x07",
    "\x1b[6n",
    "\u202e",
    "\x9b6n",
)
EVIL = f"evil{TITLE}{CLIPBOARD}{ANSWER}{BIDI}{C1}\x08end"
# Whatever a terminal would act on, but for colours and the moves of our own progress bars.
ACTED_ON = re.compile(
    "\x1b(?!\\[(?:[0-9;]*[A-HJKSTm]|\\?25[hl]))|[\x00-\x07\x0b\x0e-\x1a\x7f-\x9f\u202a-\u202e]"
)


def assert_harmless(shown: str) -> None:
    assert "evil" in shown
    assert ACTED_ON.search(shown) is None, repr(shown)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    ledger = Ledger(tmp_path / "artifacts")
    log = tmp_path / "artifacts" / "logs" / "x.log"
    log.parent.mkdir(parents=True)
    log.write_text(f"before\n{EVIL}\nafter\n")
    ledger.start(RunStart(name=f"x{EVIL}", id="x1", kind="sft", log=str(log), output_dir=f"/{EVIL}"))
    ledger.note("x1", EVIL)
    write_rows(tmp_path / "rows.jsonl", [row("t1", note=EVIL, reward=1.0)])
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ("status", "x1"),
        ("history",),
        ("history", "show", "x1"),
        ("history", "--csv"),
        ("history", "--json"),
        ("logs", "x1"),
        ("logs", "x1", "--json"),
        ("stop", EVIL.replace("\x00", "")),
        ("query", "select note::int from 'rows.jsonl'", "rows.jsonl"),
        ("query", "select note from rollouts", "rows.jsonl"),
        ("data", "filter", "rows.jsonl", "-o", "out.jsonl", "--where", f'"{EVIL}" > 1'),
        (EVIL,),
    ],
    ids=lambda words: " ".join(words)[:20].encode("ascii", "replace").decode(),
)
def test_a_command(words: tuple[str, ...], project: Path) -> None:
    shown = on_a_terminal(*words, directory=project, code=None)
    assert ACTED_ON.search(shown) is None, repr(shown)


def test_what_a_program_of_the_users_prints(project: Path) -> None:
    program = f"import sys; sys.stdout.write({EVIL!r} + '\\n\\x1b[31mred\\x1b[0m\\r 50%\\n')"
    shown = on_a_terminal("run", "p", "--", sys.executable, "-c", program, directory=project)
    assert_harmless(shown.replace("\r 50%", ""))
    assert "\x1b[31mred\x1b[0m\r 50%" in shown  # colours and progress bars work


def test_logs_are_cleaned_unless_raw_is_said(project: Path) -> None:
    def logs(*words: str) -> bytes:
        command = [ROLLBOOK, "logs", "x1", *words]
        return subprocess.run(command, cwd=project, capture_output=True, check=True).stdout

    assert_harmless(logs().decode())
    assert logs("--raw") == (project / "artifacts" / "logs" / "x.log").read_bytes()
    assert json.loads(logs("--json"))["lines"][1] == EVIL


def test_json_keeps_its_meaning() -> None:
    text = json.dumps({"a": EVIL, "b": "\U000e0001é"}, ensure_ascii=False, indent=2)
    assert ACTED_ON.search(printable_json(text)) is None
    assert json.loads(printable_json(text)) == json.loads(text)


def test_a_sequence_cut_apart_is_one_all_the_same() -> None:
    whole = f"{EVIL}\x1b[32mok\x1b[0mé\n".encode()
    for keeps_bars in (True, False):
        once = ProgramOutput(keeps_bars=keeps_bars).feed(whole, is_last=True)
        cleaned = ProgramOutput(keeps_bars=keeps_bars)
        pieces = [cleaned.feed(whole[place : place + 1]) for place in range(len(whole))]
        assert b"".join(pieces) + cleaned.feed(b"", is_last=True) == once
        assert (b"\x1b[32mok\x1b[0m" in once) == keeps_bars
    assert terminal_text(EVIL).count("\x1b") == 0


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1"])
def test_a_formula_in_csv_is_text(text: str, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [{"id": "1", "note": text, "reward": -1.5}])
    query = f"select '{text}' as note, -1.5::double as reward, '{text}' as \"=name\""
    command = [ROLLBOOK, "query", query, "rows.jsonl", "--format", "csv"]
    out = subprocess.run(command, cwd=tmp_path, capture_output=True, check=True).stdout
    cells = list(csv.reader(io.StringIO(out.decode(), newline="")))
    assert cells == [["note", "reward", "'=name"], [f"'{text}", "-1.5", f"'{text}"]]
    assert csv_cell(text) == f"'{text}"
