"""Checkpoints of a fine-tuning that were damaged after they were saved."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from helpers.damage import DAMAGES, change_a_byte, cut_off
from rollbook.errors import UsageError
from rollbook.runs.jobs.finish import find_checkpoint
from rollbook.runs.reader import open_run
from rollbook.runs.saved_models import newest_model, saved_models
from rollbook.runs.standing import standing_of
from rollbook.sft.launch import plan_start
from rollbook.sft.settings import load_settings
from rollbook.sft.train import train
from tiny_model import write_config

OUTPUT = "artifacts/model/demo"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps with a checkpoint after every second one; nothing may change it."""
    directory = tmp_path_factory.mktemp("sft")
    write_config(directory, training__max_steps=6, training__save_steps=2, data__eval=[])
    run(directory)
    return directory


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished / OUTPUT, tmp_path / OUTPUT)
    text = (finished / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(text)  # it names the data where it is
    return tmp_path


def run(directory: Path, *, resume: bool = False) -> list[str]:
    said: list[str] = []
    settings = load_settings(directory / "config.yaml")
    train(settings, directory / "artifacts", resume=resume, log=said.append)
    return said


def losses(directory: Path) -> list[float]:
    lines = [json.loads(line) for line in (directory / OUTPUT / "trainer_log.jsonl").open()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "training_state.json"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_resume_takes_the_newest_whole_one_and_says_so(
    finished: Path, copy: Path, damage: str, name: str
) -> None:
    act, expected = DAMAGES[damage]
    file = copy / OUTPUT / "checkpoint-6" / name
    act(file)
    said = run(copy, resume=True)
    assert re.fullmatch("checkpoint 'checkpoint-6' is passed over: " + expected.format(file=file), said[0])
    assert any(line == f"resuming from {copy / OUTPUT}/checkpoint-4" for line in said)
    assert losses(copy) == losses(finished)
    weights = [place / OUTPUT / "checkpoint-6/model.safetensors" for place in (copy, finished)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    (alert,) = open_run(copy / OUTPUT).alerts()
    assert alert.title == "a damaged checkpoint was passed over"


def test_without_a_whole_one_nothing_is_begun(copy: Path) -> None:
    for number in (2, 4, 6):
        change_a_byte(copy / OUTPUT / f"checkpoint-{number}/model.safetensors")
    before = (copy / OUTPUT / "trainer_log.jsonl").read_bytes()
    with pytest.raises(
        UsageError, match=r"none of its 3 checkpoints is complete .* or start over with --over"
    ):
        run(copy, resume=True)
    for number in (2, 4, 6):  # sizes are looked at before anything is started
        cut_off(copy / OUTPUT / f"checkpoint-{number}/model.safetensors")
    with pytest.raises(UsageError, match="none of its 3 checkpoints is complete"):
        plan_start(load_settings(copy / "config.yaml"), copy / "artifacts", resume=True, overwrite=False)
    assert (copy / OUTPUT / "trainer_log.jsonl").read_bytes() == before


@pytest.mark.parametrize("damage", DAMAGES)
def test_only_a_whole_one_is_promoted(copy: Path, damage: str) -> None:
    act, expected = DAMAGES[damage]
    file = copy / OUTPUT / "checkpoint-6/model.safetensors"
    act(file)
    said: list[str] = []
    assert find_checkpoint(copy / OUTPUT, None, log=said.append).step == 4
    (text,) = said
    expected = expected.format(file=file)
    assert re.fullmatch(rf"{file.parent} is passed over: {expected}", text)
    with pytest.raises(UsageError, match=f"checkpoint-6 is not complete: {expected}"):
        find_checkpoint(copy / OUTPUT, 6)


def test_status_and_the_handoff_look_at_sizes(copy: Path) -> None:
    cut_off(copy / OUTPUT / "checkpoint-6/optimizer.safetensors")
    newest = newest_model(copy / OUTPUT)
    assert newest is not None and newest.step == 4
    checkpoint = standing_of(copy / OUTPUT).checkpoint
    assert checkpoint is not None and not checkpoint.complete
    assert "optimizer.safetensors has" in str(checkpoint.problem)


def test_the_weights_of_another_trainer_are_measured_by_their_own_header(copy: Path) -> None:
    """It leaves no digests; that a file is cut off is seen all the same."""
    for number, damage in ((4, b"half"), (6, None)):
        directory = copy / OUTPUT / f"checkpoint-{number}"
        (directory / "COMPLETE").unlink()
        if damage:
            (directory / "model.safetensors").write_bytes(damage)
    assert [model.complete for model in saved_models(copy / OUTPUT)] == [True, False, True]
    cut_off(copy / OUTPUT / "checkpoint-6/model.safetensors")
    problems = [model.problem for model in saved_models(copy / OUTPUT)]
    assert problems[0] is None and problems[1] == "model.safetensors has no header that can be read"
    assert re.fullmatch(r"model\.safetensors has [\d,]+ bytes instead of [\d,]+", str(problems[2]))
