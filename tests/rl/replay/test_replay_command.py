"""`rollbook replay`, typed as a person would."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from helpers.rl_runs import settings_of, write_setup
from rollbook.cli.main import main
from rollbook.rl.train import train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    setup = write_setup(tmp_path_factory.mktemp("rl"))
    train(settings_of(setup, setup / "run", evals=[], iterations=3), log=lambda _: None)
    return setup / "run"


class Typed:
    """What a command printed, and its exit code."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *words: object) -> None:
        with pytest.raises(SystemExit) as ended:
            main(["replay", *map(str, words)])
        self.out, self.err = capsys.readouterr()
        self.code = ended.value.code or 0


def test_one_iteration_is_shown_stage_by_stage(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    typed = Typed(capsys, run, "--iteration", 1)
    lines = typed.out.splitlines()
    assert typed.code == 0
    assert lines[0].startswith("iteration 0, from the initial weights: equal to the bit; loss ")
    assert lines[1].startswith("iteration 1, from the initial weights: equal to the bit; loss ")
    assert "  advantages      equal: 16 values" in lines
    assert "  logprobs        not compared: no token export of this iteration" in lines
    assert lines[-2].startswith("promised: equal to the bit; the machine, the threads and the versions are")
    assert lines[-1] == "verdict: equal to the bit"


def test_all_of_them_are_a_line_each(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    typed = Typed(capsys, run, "--all")
    assert typed.code == 0 and typed.out.count("equal to the bit; loss") == 3
    assert "advantages" not in typed.out


def test_the_answer_is_json_and_the_progress_is_beside_it(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = Typed(capsys, run, "-i", "0-1", "--json")
    found = json.loads(typed.out)
    assert (found["verdict"], found["first"]) == ("equal", None)
    assert [one["iteration"] for one in found["iterations"]] == [0, 1]
    assert typed.err.count("equal to the bit") == 2


def test_a_difference_is_named_and_ends_in_1(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run, tmp_path / "run")
    path = tmp_path / "run" / "train_iteration_000001_transcripts.jsonl"
    lines = path.read_text().splitlines()
    line = json.loads(lines[0])
    line["task_id"] = "\x1b]0;owned\x07"  # what a record holds must not reach the terminal as it is
    path.write_text("\n".join([json.dumps(line), *lines[1:]]) + "\n")
    typed = Typed(capsys, tmp_path / "run", "-i", 1)
    assert typed.code == 1
    last = typed.out.splitlines()[-1]
    assert last.startswith("rollouts: iteration 1, group 0, trajectory 0: task_id in summary and transcript")
    assert "\x1b" not in typed.out and "<U+001B>" in last
    found = json.loads(Typed(capsys, tmp_path / "run", "-i", 1, "--json").out)
    assert found["first"]["stage"] == "rollouts" and found["first"]["group_idx"] == 0


def test_two_sides_stand_beside_each_other(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    typed = Typed(capsys, run, "learning_rate=0.1", "-i", 2, "--loss", "{name: ppo}")
    assert typed.code == 0
    lines = [line.split() for line in typed.out.splitlines()]
    assert ["recorded", "changed"] in lines and ["learning_rate", "0.01", "0.1"] in lines
    assert next(line for line in lines if line[0] == "masked")[1:] == ["0", "0"]
    typed = Typed(capsys, run, "loss.name=ppo", "-i", 2, "--json")
    assert json.loads(typed.out)["changes"]["loss"]["name"] == "ppo"


def test_a_bundle_is_cut_and_replayed(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = Typed(capsys, run, "-i", 1, "--bundle", tmp_path / "b.zip")
    assert typed.code == 0 and "micro-batch 0 of iteration 1 (optimiser step 0)" in typed.out
    assert typed.out.splitlines()[-1] == f"replay it anywhere with: rollbook replay {tmp_path / 'b.zip'}"
    monkeypatch.chdir(tmp_path)
    typed = Typed(capsys, "b.zip")
    assert typed.code == 0 and typed.out.splitlines()[-1] == "verdict: equal to the bit"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "which iteration? type: rollbook replay"),
        (["-i", "x"], "write one iteration as --iteration 3"),
        (["-i", "3-1"], "ends before it begins"),
        (["-i", "1", "--all"], "write one iteration as"),
        (["-i", "7"], "has no iteration 7; it has 0 to 2"),
        (["--all", "learning_rate=1"], "say which one"),
        (["-i", "0-1", "learning_rate=1"], "this is about one iteration"),
        (["-i", "1", "--micro-batch", "1"], "add --bundle"),
        (["-i", "1", "--bundle", "x.zip", "learning_rate=1"], "leave out the other settings"),
        (["-i", "1", "learning_rat=1"], "learning_rat cannot be asked about"),
    ],
)
def test_what_is_typed_wrong_is_told_with_what_to_type(
    run: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    typed = Typed(capsys, run, *words)
    assert typed.code == 2 and said in typed.err and "Traceback" not in typed.err
