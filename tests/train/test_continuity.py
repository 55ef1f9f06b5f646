"""A run goes on with the data it would have seen and the log it would have had; anything else is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from rollbook.errors import LockedError, RollbookError, UsageError
from rollbook.train.launch import carry_out, plan_run
from rollbook.train.settings import load_settings
from rollbook.train.sft import train
from tiny_model import CHATML, sums, write_config

TIMES = ("elapsed_time", "remaining_time", "throughput")


class Killed(BaseException):
    """Nothing in the code catches it, so a run ends where it is raised."""


def run(directory: Path, *words: str, resume: bool = False, until: str | None = None) -> list[str]:
    """What it said. `until` kills it after the line that begins so."""
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        if until is not None and text.startswith(until):
            raise Killed

    try:
        settings = load_settings(directory / "config.yaml", words)
        train(settings, directory / "artifacts", resume=resume, say=say)
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
        (["training.seed=7"], r"changed: training\.seed\."),
        (["training.per_device_train_batch_size=2"], r"changed: rows a step\."),
        (["data.max_length=50"], r"changed: data\.max_length\."),
        (["training.max_steps=3"], "has more steps than the 3"),
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
    with pytest.raises(UsageError, match=r"changed: data\.train\."):
        run(halfway, resume=True)


def test_other_masks_are_refused(halfway: Path) -> None:
    with pytest.raises(UsageError, match=r"changed: data\.train_on\."):
        run(halfway, "data.train_on=last", resume=True)
    template = halfway / "other.jinja"
    template.write_text(CHATML.replace("assistant", "model"))
    with pytest.raises(UsageError, match=r"changed: model\.chat_template\."):
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

    train(load_settings(tmp_path / "config.yaml"), tmp_path / "artifacts", resume=False, say=listen)
    ((before, after),) = seen
    assert before == after
    assert [line["current_steps"] for line in log_of(tmp_path)] == [*range(1, 9), 8]


def second(directory: Path, how: str) -> None:
    settings, artifacts = load_settings(directory / "config.yaml"), directory / "artifacts"
    resume = how == "--resume"
    plan = plan_run(settings, artifacts, resume=resume, overwrite=not resume)
    carry_out(plan, settings, artifacts, directory / "config.yaml", say=lambda _: None)
    train(settings, artifacts, resume=resume, say=lambda _: None)


def test_overwrite_sets_the_old_run_aside_after_the_new_data_was_read(halfway: Path) -> None:
    output = halfway / "artifacts/model/demo"
    (output / "settings.json").touch()
    mine = {"README.md": "mine", "tokenizer_notes.txt": "mine too", "checkpoint-notes": "also"}
    for name, text in mine.items():
        (output / name).write_text(text)
    there = sorted(path.relative_to(output) for path in output.rglob("*"))
    data = halfway / "train.jsonl"
    good = data.read_text()
    data.write_text(good + "{half\n")
    settings, artifacts = load_settings(halfway / "config.yaml"), halfway / "artifacts"
    plan = plan_run(settings, artifacts, resume=False, overwrite=True)
    with pytest.raises(RollbookError, match=r"train\.jsonl:61"):
        carry_out(plan, settings, artifacts, halfway / "config.yaml", say=lambda _: None)
    assert sorted(path.relative_to(output) for path in output.rglob("*")) == there

    data.write_text(good)
    weights = (output / "checkpoint-4/model.safetensors").read_bytes()
    carry_out(plan, settings, artifacts, halfway / "config.yaml", say=lambda _: None)
    assert {name: (output / name).read_text() for name in mine} == mine
    assert not (output / "checkpoint-4").exists() and not (output / "trainer_log.jsonl").exists()
    assert (output / "superseded/run_001/checkpoint-4/model.safetensors").read_bytes() == weights


def test_other_settings_may_change_and_that_is_said(halfway: Path) -> None:
    said = run(halfway, "training.learning_rate=0.001", "training.max_steps=10", resume=True)
    assert "changed since then: training.learning_rate 0.01 -> 0.001" in said
    assert "changed since then: training.max_steps 8 -> 10" in said
    assert log_of(halfway)[-1]["total_steps"] == log_of(halfway)[-1]["current_steps"] == 10


def test_the_checkpoint_of_another_trainer_is_no_place_to_go_on_from(halfway: Path) -> None:
    path = halfway / "artifacts/model/demo/checkpoint-4/trainer_state.json"
    state = json.loads(path.read_text())
    path.write_text(json.dumps(state | {"stateful_callbacks": {}}))
    with pytest.raises(UsageError, match=r"saved by another trainer; model\.path: .*checkpoint-4"):
        run(halfway, resume=True)


def test_resuming_what_died_before_its_first_checkpoint_begins_again(tmp_path: Path) -> None:
    settings = load_settings(write_config(tmp_path))
    output = tmp_path / "artifacts" / "model" / "demo"
    output.mkdir(parents=True)
    (output / "notes.txt").touch()
    with pytest.raises(RollbookError, match="no run in it to resume"):
        plan_run(settings, tmp_path / "artifacts", resume=True, overwrite=False)
    (output / "settings.json").touch()
    plan = plan_run(settings, tmp_path / "artifacts", resume=True, overwrite=False)
    assert plan.resumed_from is None and "resume: from the beginning" in plan.lines()[1]


@pytest.mark.parametrize("limit", [500_000, 12_000])
def test_a_full_disk_says_so_and_leaves_no_half_checkpoint(halfway: Path, limit: int) -> None:
    """The limit on a file's size fails in the middle of the optimiser's or the random state's."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(
            RollbookError, match=r"checkpoint-8 could not be written .* bytes left on the disk"
        ):
            run(halfway, resume=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    output = halfway / "artifacts/model/demo"
    assert sorted(path.name for path in output.iterdir() if "checkpoint" in path.name) == ["checkpoint-4"]
    assert log_of(halfway)[-1]["current_steps"] == 8
    run(halfway, resume=True)
    assert (output / "checkpoint-8" / "COMPLETE").exists()
