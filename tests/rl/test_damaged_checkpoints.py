"""Checkpoints of reinforcement learning that were damaged after they were saved."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers.damage import DAMAGES, change_a_byte
from helpers.rl_runs import settings_of, write_setup
from rollbook.cli.main import main
from rollbook.errors import UsageError
from rollbook.records.iterations import IterationRecord
from rollbook.records.record import read_records
from rollbook.rl.train import train
from rollbook.runs.reader import open_run

QUIET: Any = lambda _: None  # noqa: E731


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a finished run of four iterations, which nothing may change."""
    directory = write_setup(tmp_path_factory.mktemp("rl"))
    train(settings_of(directory, directory / "finished", iterations=4, evals=[]), log=QUIET)
    return directory


@pytest.fixture
def run(setup: Path, tmp_path: Path) -> Path:
    shutil.copytree(setup / "finished", tmp_path / "run")
    return tmp_path / "run"


def digests(run: Path) -> list[str | None]:
    return [record.weights_digest for record in read_records(run / "iterations.jsonl", IterationRecord)]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_resume_takes_the_newest_whole_one_and_says_so(setup: Path, run: Path, damage: str) -> None:
    act, expected = DAMAGES[damage]
    file = run / "checkpoints/000004/model.safetensors"
    act(file)
    said: list[str] = []
    result = train(settings_of(setup, run, iterations=4, evals=[]), resume=True, log=said.append)
    expected = "checkpoint '000004' is passed over: " + expected.format(file=file)
    assert re.fullmatch(expected, said[0])
    assert open_run(run).attempts[-1].resumed_from == "000002"
    assert digests(run) == digests(setup / "finished")
    assert result.checkpoint == run / "checkpoints/000004"
    assert "a damaged checkpoint was passed over" in [alert.title for alert in open_run(run).alerts()]


def test_without_a_whole_one_nothing_is_begun(setup: Path, run: Path) -> None:
    for number in (2, 4):
        change_a_byte(run / f"checkpoints/{number:06d}/model.safetensors")
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(
        UsageError, match=r"none of its 2 checkpoints is complete .* start over with --overwrite"
    ):
        train(settings_of(setup, run, iterations=4, evals=[]), resume=True, log=QUIET)
    with pytest.raises(
        UsageError, match=r"checkpoint '000004' is not complete: .*model\.safetensors was changed"
    ):
        train(settings_of(setup, run, iterations=4, evals=[]), resume="000004", log=QUIET)
    assert (run / "metrics.jsonl").read_bytes() == before


def test_a_finished_run_whose_result_was_damaged_is_not_handed_over_as_it_is(
    setup: Path, run: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`rollbook rl --resume` takes the lost iterations again."""
    monkeypatch.chdir(run.parent)
    settings = msgspec.to_builtins(settings_of(setup, run, iterations=4, evals=[]))
    Path("config.yaml").write_text(json.dumps(settings))
    change_a_byte(run / "checkpoints/000004/model.safetensors")
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["rl", "config.yaml", "--resume"])
    said = capfd.readouterr()
    assert "checkpoint '000004' is passed over: " in said.out and "is complete: all" not in said.out
    assert digests(run) == digests(setup / "finished")
    assert "run/checkpoints/000004" in Path("config.yaml").read_text()
