"""Wherever a mean reward is shown, its standard error is beside it, and in --json under its own key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import rollbook
from collecting import ROLLBOOK, config, row, words, write_rows
from recorded import python


def say(directory: Path, *arguments: object) -> str:
    ran = python(*ROLLBOOK[1:], *map(str, arguments))
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.fixture
def collected(tmp_path: Path) -> Path:
    """Rewards 1, 1, 1, 0: deviation 0.5, standard error 0.25."""
    rows = [row(f"t{number}", expected_answer="3" if number == 3 else "2") for number in range(4)]
    write_rows(tmp_path / "in.jsonl", rows)
    config(tmp_path)
    say(tmp_path, "collect", *words(tmp_path))
    return tmp_path


def test_of_a_collection(collected: Path) -> None:
    output, artifacts = collected / "out.jsonl", f"--artifacts={collected / 'artifacts'}"
    assert "0.75 ± 0.25, mean over 4 rollouts" in say(collected, "status", output)
    status = json.loads(say(collected, "status", output, "--json"))
    assert status["progress"]["collection"]["reward_std_error"] == 0.25
    history: list[dict[str, Any]] = json.loads(say(collected, "history", artifacts, "--json"))
    assert history[0]["metrics"]["reward_std_error"] == 0.25
    stats = json.loads(say(collected, "data", "stats", output, "--json"))
    assert (stats["fields"][0]["std"], stats["fields"][0]["std_error"]) == (0.5, 0.25)
    assert "std error" in say(collected, "data", "stats", output)
    assert "pass@1    0.75 ± 0.25 over 4 tasks" in say(collected, "data", "profile", output)
    assert "0.75 ± 0.25" in say(collected, "audit", output)


def test_of_a_run(tmp_path: Path) -> None:
    with rollbook.Run(tmp_path / "run") as recording, recording.rollouts(iteration=0) as log:
        with log.group(size=4) as group:
            for reward in (1.0, 1.0, 1.0, 0.0):
                group.add(rollbook.Trajectory.single_turn("Q?", "A", reward))
        recording.log_metrics(log.metrics(), step=0)
    (line,) = rollbook.open_run(tmp_path / "run").metrics
    assert (line["env/all/reward/std"], line["env/all/reward/std_error"]) == (0.5, 0.25)
    page = (tmp_path / "run" / "train_iteration_000000.html").read_text()
    assert "mean reward 0.75 ± 0.25" in page
