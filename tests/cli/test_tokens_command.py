"""`rollbook tokens`, typed as a person would: on runs, directories and files, ours and a peer's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers import preloaded
from helpers.token_exports import Export


def call(*words: object, code: int = 0) -> str:
    result = preloaded.run("rollbook", "tokens", *words)
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
        "by iteration", "by turn", "by position in the reply", "by position in the row", "by process",
        "what if", "name=ipo",
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
    assert "group_idx 1, traj_idx 2" in said and "between ⟦ and ⟧: left out by the loss" in said
    assert "é" in said and "\\xC3" not in said.split("largest")[0]  # one character of two tokens
    assert "⟦" in said  # a masked token, where there are no colours
    assert "\x1b" not in said
    (row,) = json.loads(call(run, "--at", "1/1/2/0", "--json"))
    assert (row["rank"], len(row["tokens"])) == (1, 24)
    assert row["tokens"][0]["advantage"] is None and row["tokens"][5]["advantage"] in (0.5, -0.5)


class TwoSteps(Export):
    """Each trajectory is trained in two optimiser steps."""

    def _head(self, iteration: int, rank: int, row: int, middle: int) -> dict[str, Any]:
        head = super()._head(iteration, rank, row, middle)
        return {**head, "traj_idx": row // 2, "optim_step": row % 2}


def test_the_place_of_a_token_in_the_table_is_what_at_takes(tmp_path: Path) -> None:
    """With the optimiser step: the same token has another mismatch in each."""
    TwoSteps().write(tmp_path)
    report = json.loads(call(tmp_path, "--json", "--top", "40"))
    largest = next(one for one in report["top"] if one["optim_step"] == 1 and one["mismatch_kl"] is not None)
    place = "{iteration}/{group_idx}/{traj_idx}:{token_idx}".format(**largest)
    lines = call(tmp_path, "--top", "40").splitlines()
    line = next(line for line in lines if line.split()[:2] == [place, "1"])
    assert lines[lines.index(line) - report["top"].index(largest) - 1].split()[:2] == ["at", "step"]
    said = call(tmp_path, "--at", place, "--optim-step", "1")
    assert "trained in the optimiser steps 0, 1; this is step 1" in said
    numbers = line.split()[:8]
    (shown,) = (one for one in said.splitlines() if one.startswith(place))
    assert shown.split()[:8] == numbers
    ((token,),) = (
        row["tokens"] for row in json.loads(call(tmp_path, "--at", place, "--optim-step", "1", "--json"))
    )
    assert token["mismatch_kl"] == pytest.approx(largest["mismatch_kl"])
    assert "this is step 0" in call(tmp_path, "--at", place)
    assert "--optim-step 2: 1/1/0 was trained in: 0, 1" in call(
        tmp_path, "--at", "1/1/0", "--optim-step", "2", code=2
    )


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
    assert "1/0/2:3" in call(peer_fixtures / "prime_rl", "--at", "1/0/2:3")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--at", "3"], "--at 3: write ITERATION/GROUP/TRAJECTORY"),
        (["--at", "1/1/2", "--iteration", "1"], "--at names the iteration itself"),
        (["--at", "7/0/0"], "no tokens of iteration 7"),
        (["--at", "1/1/2:24"], "--at 1/1/2/0:24: the row has 24 tokens, counted from 0"),
        (["--optim-step", "0"], "--optim-step goes with --at"),
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
