"""`rollbook tokens`, typed as a person would: on runs, directories and files, ours and a peer's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.token_exports import Export

ROLLBOOK = str(Path(sys.executable).parent / "rollbook")


def call(*words: object, code: int = 0) -> str:
    result = subprocess.run([ROLLBOOK, "tokens", *map(str, words)], capture_output=True, text=True)
    assert result.returncode == code, result.stderr
    return result.stdout + result.stderr


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tokens") / "run"
    Export(loud=1).write(root)
    return root


def test_the_tables(run: Path) -> None:
    said = call(run, "--top", "3", "--what-if", "clip_high=0.4", "--what-if", "name=ipo")
    assert "iterations 0 to 2, 24 rows; 432 tokens the loss saw" in said
    assert "loss ppo: clip_low 0.1, clip_high 0.1" in said
    for title in (
        "masked, advantage above 0", "masked, advantage below 0", "largest mismatch KL", "by environment",
        "by iteration", "by turn", "by position", "by process", "what if", "name=ipo",
    ):  # fmt: skip
        assert title in said
    assert said.count("differs from the others") == 1
    assert "\x1b" not in said and "<U+001B>[31m" in said  # a token of the model is an escape sequence


def test_what_is_missing_and_what_was_not_applied_stand_first(tmp_path: Path) -> None:
    files = Export(iterations=6).write(tmp_path)
    steps = [json.loads(line) for line in files.manifest.read_bytes().splitlines()]
    for step in steps[1:]:
        step |= {"selected": 9, "complete": False, "applied": [True, False]}
        step["ranks"][1]["error"] = "the disk is full \x1b[31m"
    files.manifest.write_text("".join(json.dumps(step) + "\n" for step in steps))
    said = call(tmp_path)
    assert "iteration 1: 1 of 9 rows are missing: process 1: the disk is full" in said
    assert "iteration 3: not applied: optimiser step 1;" in said
    assert "and 2 more iterations with missing rows" in said and "and 2 more iterations with such" in said
    assert "iteration 4: " not in said and "\x1b" not in said


def test_one_row_as_text(run: Path) -> None:
    said = call(run, "--at", "1/1/2")
    assert "group_idx 1, traj_idx 2" in said and "underlined: left out by the loss" in said
    assert "é" in said and "\\xC3" not in said.split("largest")[0]  # one character of two tokens
    assert "⟦" in said  # a masked token, where there are no colours
    assert "\x1b" not in said
    (row,) = json.loads(call(run, "--at", "1/1/2/0", "--json"))
    assert (row["rank"], len(row["tokens"])) == (1, 24)
    assert row["tokens"][0]["advantage"] is None and row["tokens"][5]["advantage"] in (0.5, -0.5)


def test_json_is_the_whole_report(run: Path) -> None:
    report = json.loads(call(run, "--iteration", "1", "--json", "--top", "2", "--band", "0.8,1.25"))
    assert report["iterations"] == [1, 1] and report["band"] == [0.8, 1.25]
    assert len(report["masked_by_text"]["positive"]["top"]) == 2 == len(report["top"])
    assert len(report["by_rank"]) == 2 and report["total"]["tokens"] == 144


def test_files_and_directories_of_a_peer(peer_fixtures: Path, run: Path) -> None:
    exports = peer_fixtures / "prime_rl" / "token_exports"
    for place, rows in (
        (peer_fixtures / "prime_rl", 12), (exports, 12), (exports / "step_1", 6),
        (exports / "step_1" / "rank_0.jsonl", 3), (run / "token_exports" / "rank_1.jsonl", 12),
    ):  # fmt: skip
        assert f" {rows} rows;" in call(place)
    assert "6 other records, such as 1/0/0" in call(peer_fixtures / "prime_rl", "--at", "1/9/9", code=2)
    assert "token 939" in call(peer_fixtures / "prime_rl", "--at", "1/0/2")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--at", "3"], "--at 3: write ITERATION/GROUP/TRAJECTORY"),
        (["--at", "1/1/2", "--iteration", "1"], "--at names the iteration itself"),
        (["--at", "7/0/0"], "no tokens of iteration 7"),
        (["--at", "1/0/9"], "no tokens of 1/0/9; iteration 1 has 8 other records, such as 1/0/0"),
        (["--band", "1"], "--band 1: write two numbers"),
        (["--band", "2,1"], "--band 2,1: the first number"),
        (["--iteration", "9"], "the export has no records of iteration 9; it has 0 to 2"),
        (["--what-if", "clip=1"], "the loss 'ppo' has no bound 'clip'"),
    ],
)
def test_wrong_words_say_what_to_type(run: Path, words: list[Any], why: str) -> None:
    assert why in call(run, *words, code=2)


def test_no_torch_is_loaded(run: Path) -> None:
    code = f"""
import sys
from rollbook.cli.main import main
for words in ([], ["--json"], ["--at", "1/1/2"], ["--what-if", "clip_high=0.3"]):
    try:
        main(["tokens", {str(run)!r}, *words])
    except SystemExit as end:
        assert not end.code
sys.exit("torch" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
