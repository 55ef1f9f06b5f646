"""A run goes on with the data it would have seen and the log it would have had; anything else is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from rollbook.errors import LockedError, RollbookError, UsageError
from rollbook.runs.reader import open_run
from rollbook.sft.launch import plan_start
from rollbook.sft.settings import load_settings
from rollbook.sft.train import train
from tiny_model import CHATML, sums, write_config

TIMES = ("elapsed_time", "remaining_time", "throughput", "elapsed_s")


class Killed(BaseException):
    """Nothing in the code catches it, so a run ends where it is raised."""


def run(
    directory: Path, *words: str, resume: bool = False, overwrite: bool = False, until: str | None = None
) -> list[str]:
    """What it said. `until` kills it after the line that begins so."""
    said: list[str] = []

    def log(text: str) -> None:
        said.append(text)
        if until is not None and text.startswith(until):
            raise Killed

    try:
        settings = load_settings(directory / "config.yaml", words)
        train(settings, directory / "artifacts", resume=resume, overwrite=overwrite, log=log)
    except Killed:
        pass
    return said


def log_of(directory: Path) -> list[dict[str, Any]]:
    lines = (directory / "artifacts/model/demo/trainer_log.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in TIMES} for line in lines]


@pytest.fixture
def halfway(tmp_path: Path) -> Path:
    """Killed in step 5, with a checkpoint of step 4 between two logged steps."""
    write_config(
        tmp_path, training__max_steps=8, training__save_steps=4, training__logging_steps=3, data__eval=[]
    )
    run(tmp_path, until="saved ")
    return tmp_path


def test_a_checkpoint_between_two_logged_steps_loses_nothing_of_the_log(
    halfway: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = tmp_path_factory.mktemp("whole")
    write_config(
        whole, training__max_steps=8, training__save_steps=4, training__logging_steps=3, data__eval=[]
    )
    run(whole)
    run(halfway, resume=True)
    assert log_of(halfway) == log_of(whole)
    assert [line["current_steps"] for line in log_of(whole)] == [3, 6, 8, 8]
    run(whole, resume=True)  # of a finished run: there is nothing left to do, and nothing is written twice
    assert log_of(whole) == log_of(halfway)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["training.seed=7"], r"checkpoint-4: training\.seed: 42 -> 7 changed since it was saved"),
        (
            ["training.per_device_train_batch_size=2"],
            r"per_device_train_batch_size: 4 -> 2 changed",
        ),
        (["data.max_length=50"], r"data\.max_length: 64 -> 50 changed"),
        (["data.train_on=last"], r"data\.train_on: 'assistant' -> 'last' changed"),
        (["training.max_steps=3"], "it is at step 4, but the settings end at step 3"),
    ],
)
def test_what_would_change_the_data_is_refused(halfway: Path, words: list[str], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        run(halfway, *words, resume=True)


def test_adapters_and_whole_models_are_told_apart(halfway: Path) -> None:
    saved = halfway / "artifacts/model/demo/checkpoint-4"
    words = ["model.config=null", f"model.path={saved}", "model.lora={rank: 2, alpha: 0.5}"]
    with pytest.raises(UsageError, match=r"checkpoint-4 holds a whole model: set model\.lora as it was"):
        run(halfway, *words, resume=True)
    run(halfway, *words, "training.output_dir=adapted", "training.max_steps=2")
    adapted = halfway / "artifacts/model/adapted/checkpoint-2/adapter_config.json"
    stored = json.loads(adapted.read_text())
    assert stored["lora_alpha"] == 0.5 and stored["base_model_name_or_path"] == str(saved)


def test_an_edited_file_is_refused(halfway: Path) -> None:
    rows = [*sums(59), {"messages": [*sums(1)[0]["messages"][:1], {"role": "assistant", "content": "No."}]}]
    (halfway / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UsageError, match=r"data\.train \(the files, or the tokenizer\) changed since"):
        run(halfway, resume=True)


def test_another_template_is_refused(halfway: Path) -> None:
    template = halfway / "other.jinja"
    template.write_text(CHATML.replace("{{ message.content }}", "{{ message.content }} "))
    with pytest.raises(UsageError, match=r"model\.chat_template: None -> .* changed since"):
        run(halfway, f"model.chat_template={template}", resume=True)


def test_a_second_trainer_touches_nothing_of_a_live_run(tmp_path: Path) -> None:
    """It is refused before it cuts the log back to the checkpoint or removes what is being saved."""
    write_config(tmp_path, training__max_steps=8, training__save_steps=4, data__eval=[])
    output = tmp_path / "artifacts/model/demo"
    seen: list[tuple[Any, Any]] = []

    def listen(text: str) -> None:
        if text.startswith("step 6/"):
            making = output / ".checkpoint-8.making"
            making.mkdir()
            before = (output / "trainer_log.jsonl").read_bytes()
            for words in (["--resume"], ["--overwrite"]):
                with pytest.raises(LockedError, match=f"pid {os.getpid()}"):
                    second(tmp_path, *words)
            seen.append((before, (output / "trainer_log.jsonl").read_bytes()))
            assert making.exists() and (output / "checkpoint-4").exists()

    train(load_settings(tmp_path / "config.yaml"), tmp_path / "artifacts", resume=False, log=listen)
    ((before, after),) = seen
    assert before == after
    assert [line["current_steps"] for line in log_of(tmp_path)] == [*range(1, 9), 8]


def second(directory: Path, how: str) -> None:
    settings, artifacts = load_settings(directory / "config.yaml"), directory / "artifacts"
    train(settings, artifacts, resume=how == "--resume", overwrite=how == "--overwrite", log=lambda _: None)


def test_overwrite_sets_the_old_run_aside_after_the_new_data_was_read(halfway: Path) -> None:
    output = halfway / "artifacts/model/demo"
    mine = {"README.md": "mine", "tokenizer_notes.txt": "mine too", "checkpoint-notes": "also"}
    for name, text in mine.items():
        (output / name).write_text(text)
    there = {path.relative_to(output): path.is_file() and path.read_bytes() for path in output.rglob("*")}
    data = halfway / "train.jsonl"
    good = data.read_text()
    data.write_text(good + "{half\n")
    with pytest.raises(RollbookError, match=r"train\.jsonl:61"):
        second(halfway, "--overwrite")
    after = {path.relative_to(output): path.is_file() and path.read_bytes() for path in output.rglob("*")}
    assert after == there

    data.write_text(good)
    weights = (output / "checkpoint-4/model.safetensors").read_bytes()
    run(halfway, "training.max_steps=2", overwrite=True)
    assert {name: (output / name).read_text() for name in mine} == mine
    assert [path.name for path in output.glob("checkpoint-*[0-9]")] == ["checkpoint-2"]
    kept = output / "superseded/run_001"
    assert (kept / "checkpoint-4/model.safetensors").read_bytes() == weights
    assert [line["current_steps"] for line in log_of(halfway)] == [2, 2] and open_run(
        kept
    ).metrics.by_step()  # a run like any other
    assert not open_run(output).info.attempts[1:]


def test_a_second_run_in_a_directory_is_refused_unless_told(halfway: Path) -> None:
    with pytest.raises(UsageError, match="--resume continues from step 4, --overwrite sets aside"):
        run(halfway)


def test_other_settings_may_change_and_that_is_said(halfway: Path) -> None:
    said = run(halfway, "training.learning_rate=0.001", "training.max_steps=10", resume=True)
    assert "changed since it was saved: training.learning_rate: 0.01 -> 0.001" in said
    assert "changed since it was saved: training.max_steps: 8 -> 10" in said
    assert log_of(halfway)[-1]["total_steps"] == log_of(halfway)[-1]["current_steps"] == 10


def test_the_checkpoint_of_another_trainer_cannot_be_resumed(halfway: Path) -> None:
    checkpoint = halfway / "artifacts/model/demo/checkpoint-4"
    (checkpoint / "training_state.json").write_text("{}")
    (checkpoint / "COMPLETE").unlink()  # only ours have that
    with pytest.raises(UsageError, match=r"saved by another trainer; model\.path: .*checkpoint-4"):
        run(halfway, resume=True)


def test_resuming_what_died_before_its_first_checkpoint_begins_again(tmp_path: Path) -> None:
    settings = load_settings(write_config(tmp_path, training__max_steps=2, data__eval=[]))
    output = tmp_path / "artifacts" / "model" / "demo"
    output.mkdir(parents=True)
    (output / "notes.txt").touch()
    with pytest.raises(RollbookError, match="no run in it to resume"):
        plan_start(settings, tmp_path / "artifacts", resume=True, overwrite=False)
    (output / "notes.txt").unlink()
    run(tmp_path, until="step 1/")
    plan = plan_start(settings, tmp_path / "artifacts", resume=True, overwrite=False)
    assert plan.checkpoint is None and "starting over (no checkpoint was saved)" in plan.lines()[1]
    run(tmp_path, resume=True)
    assert [line["current_steps"] for line in log_of(tmp_path)] == [1, 2, 2]


@pytest.mark.parametrize("limit", [500_000, 12_000])
def test_a_full_disk_says_so_and_leaves_no_half_checkpoint(halfway: Path, limit: int) -> None:
    """The limit on a file's size fails in the middle of the optimiser's or the random state's."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill_disk(text: str) -> None:
        if text.startswith("step 8/"):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))

    settings = load_settings(halfway / "config.yaml")
    try:
        with pytest.raises(
            RollbookError, match=r"could not be written to .*checkpoint-8.* bytes left on the disk"
        ):
            train(settings, halfway / "artifacts", resume=True, log=fill_disk)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    output = halfway / "artifacts/model/demo"
    saved = sorted(path.name for path in output.iterdir() if "checkpoint-" in path.name)
    assert saved == ["checkpoint-4"]
    assert log_of(halfway)[-1]["current_steps"] == 8
    run(halfway, resume=True)
    assert (output / "checkpoint-8" / "COMPLETE").exists()
