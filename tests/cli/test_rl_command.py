"""`rollbook rl` as it is typed: what is refused before anything starts, and what a run hands over."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from helpers import preloaded
from helpers.rl_runs import config_of, write_setup
from rollbook.records.layout import RunFiles
from rollbook.records.locks import FileLock


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_setup(tmp_path_factory.mktemp("command"))


def rollbook(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return preloaded.run("rollbook", *arguments, cwd=directory)


def write_config(setup: Path, directory: Path, **changes: object) -> Path:
    path = directory / "config.yaml"
    path.write_text(json.dumps(config_of(setup, directory / "run", **changes)))
    return path


def test_a_run_that_is_being_written_is_refused_and_the_history_stays_as_it_is(
    setup: Path, tmp_path: Path
) -> None:
    write_config(setup, tmp_path)
    files = RunFiles(tmp_path / "run")
    files.root.mkdir()
    files.run.write_text("{}")
    for option in ("--resume", "--overwrite"):
        with FileLock(files.run):
            refused = rollbook(tmp_path, "rl", "config.yaml", option)
        assert refused.returncode == 1
        assert "is being written by another process" in refused.stderr
        assert refused.stderr.count("rollbook:") == 1
    assert not (tmp_path / "artifacts").exists()


def test_an_error_of_the_run_is_said_once_and_its_end_is_named(setup: Path, tmp_path: Path) -> None:
    write_config(setup, tmp_path, sampler={"max_length": 100_000})
    failed = rollbook(tmp_path, "rl", "config.yaml")
    assert failed.returncode == 2
    said = failed.stdout + failed.stderr
    assert said.count("sampler.max_length is 100000, but the model has 64 positions") == 1
    assert failed.stderr.splitlines()[-1] == "rollbook: run failed: exit code 2"


def test_a_run_that_an_alert_has_stopped_says_how_to_go_on(setup: Path, tmp_path: Path) -> None:
    write_config(setup, tmp_path, on_alert="stop")
    assert rollbook(tmp_path, "rl", "config.yaml", "--overwrite").returncode != 0
    assert "to resume: rollbook rl config.yaml --resume\n" in rollbook(tmp_path, "status").stdout


def test_a_complete_run_hands_its_result_over_again_and_starts_nothing(setup: Path, tmp_path: Path) -> None:
    config = write_config(setup, tmp_path, iterations=2)
    first = rollbook(tmp_path, "rl", "config.yaml", "--resume")
    assert first.returncode == 0
    assert f"{tmp_path / 'run'} has no checkpoint to resume: starting from the beginning" in first.stdout
    config.write_text(json.dumps(config_of(setup, tmp_path / "run", iterations=2)))  # as before the handoff
    resumed = rollbook(tmp_path, "rl", "config.yaml", "--resume")
    assert resumed.returncode == 0, resumed.stderr
    complete, where = resumed.stdout.splitlines()
    assert "is complete: all 2 iterations are done" in complete
    assert where == f"config.yaml: checkpoint_path is {tmp_path / 'run/checkpoints/000002'}"
    assert "run/checkpoints/000002" in config.read_text()
    runs = json.loads(rollbook(tmp_path, "history", "--json").stdout)
    assert [run["checkpoint"]["step"] for run in runs] == [2]
    typed = json.loads(RunFiles(tmp_path / "run").run.read_text())["command"]
    assert typed == ["rollbook", "rl", "config.yaml", "--resume"]  # and not the process that trains
