"""What `rollbook sft --resume` says before anything is loaded: complete, or refused; and it enters no run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rollbook.sft import resumable
from rollbook.sft.settings import load_settings
from rollbook.train import state
from tiny_model import write_config

# Whatever of torch is imported is noticed: a module that stands before it fails.
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from rollbook.cli.main import main; main()"
WITH_TORCH = "from rollbook.cli.main import main; main()"


def sft(directory: Path, *words: str, program: str = WITHOUT_TORCH) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, "sft", "config.yaml", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("finished")
    write_config(directory, training__max_steps=2, training__save_steps=2, data__eval=[])
    done = sft(directory, program=WITH_TORCH)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory


def index(directory: Path) -> bytes:
    return (directory / "artifacts" / "index.yaml").read_bytes()


def test_a_finished_run_is_complete_and_published_again(finished: Path) -> None:
    before, config = index(finished), finished / "config.yaml"
    text = config.read_text()
    config.write_text(text.partition("runtime_info:")[0])  # somebody lost the result
    done = sft(finished, "--resume")
    assert done.returncode == 0, done.stderr
    assert "is complete: its last step is done. To train on" in done.stdout
    assert "training.max_steps=4 --resume" in done.stdout
    published = yaml.safe_load(config.read_text())["runtime_info"]["output"]["checkpoint_path"]
    assert published.endswith("checkpoint-2")
    assert published in done.stdout
    told = json.loads(sft(finished, "--resume", "--json").stdout)
    assert (told["status"], told["published"]) == ("completed", True)
    assert index(finished) == before


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("training.seed=7", r"training.seed: "),
        ("training.gradient_accumulation_steps=3", "training.gradient_accumulation_steps: 1 -> 3"),
        ("data.max_length=50", "data.max_length: "),
        ("data.train=[{path: train.jsonl, weight: 2}]", "data.train[0].weight: 1.0 -> 2.0"),
    ],
)
def test_settings_that_change_the_data_are_refused_once_and_enter_nothing(
    word: str, said: str, finished: Path
) -> None:
    before = index(finished)
    done = sft(finished, word, "training.max_steps=4", "--resume")
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("cannot resume") == 1
    assert said in done.stderr
    assert "cannot resume" not in done.stdout
    assert index(finished) == before


def test_more_steps_are_trained(finished: Path) -> None:
    settings = load_settings(finished / "config.yaml", ["training.max_steps=4"])
    directory = settings.output_dir(finished / "artifacts")
    assert not resumable.is_finished(directory, settings)
    assert resumable.is_finished(directory, load_settings(finished / "config.yaml"))


def test_a_run_without_its_summary_is_not_finished(finished: Path) -> None:
    """Killed between its last checkpoint and train_results.json: the summary is still to be written."""
    settings = load_settings(finished / "config.yaml")
    directory = settings.output_dir(finished / "artifacts")
    results = directory / "train_results.json"
    text = results.read_bytes()
    results.unlink()
    try:
        assert not resumable.is_finished(directory, settings)
    finally:
        results.write_bytes(text)


def test_the_file_of_a_job_has_one_name() -> None:
    assert resumable.STATE_OF_JOB == state.EXTRA
