"""`rollbook demo`, typed once as a new user types it: the tiny model learns, and it can all be looked at.

This is the test that the whole loop learns; no other one spends the time to show it for a single turn.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rollbook
from rollbook.cli.demo import read_back
from rollbook.demo.files import HELD_OUT, DemoFiles
from rollbook.records.complete import is_complete
from rollbook.rl.settings import load_settings
from rollbook.runs.handoff import resolve_checkpoint
from rollbook.runs.jobs.ledger import Ledger, Status
from rollbook.train.losses import PpoClip

SCRIPTS = Path(sys.executable).parent


def typed(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        words, cwd=directory, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def printed(home: Path) -> str:
    done = typed(home, "rollbook", "demo")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def files(home: Path, printed: str) -> DemoFiles:
    return DemoFiles(home / "demo")


@pytest.fixture(scope="module")
def summary(files: DemoFiles) -> dict[str, Any]:
    return read_back(files)


def test_the_tiny_model_learns(summary: dict[str, Any]) -> None:
    """On tasks that were held out of training, before the first step and after the last one."""
    assert summary["before"] < 0.5
    assert summary["after"] > 0.9
    assert list(summary["held_out_by_iteration"]) == [0, 20, 40, 60, 80]
    assert summary["rollouts"] == 80 * 32 * 8 and summary["failed"] == 0


def test_it_ends_without_an_alert(summary: dict[str, Any], files: DemoFiles) -> None:
    assert summary["alerts"] == []
    assert (files.run / "stalls.jsonl").read_text() == ""


def test_the_trainer_agrees_with_the_sampler_all_the_way(files: DemoFiles) -> None:
    rows = rollbook.open_run(files.run).metrics.by_step()[:-1]
    assert len(rows) == 80
    assert all(0 <= row["kl_sample_train_v3"] < 1e-9 for row in rows)
    assert all(row["optim/applied"] == 1.0 and row["groups/trained"] > 0 for row in rows)
    assert rows[-1]["entropy"] < rows[0]["entropy"]


def test_what_was_held_out_was_not_trained_on(files: DemoFiles) -> None:
    run = rollbook.open_run(files.run)
    held_out = {rollout.task_id for rollout in run.rollouts(0, "eval/test")}
    assert len(held_out) == HELD_OUT
    assert held_out.isdisjoint({rollout.task_id for rollout in run.rollouts(split="train")})


def test_both_runs_are_in_the_history_and_handed_over(files: DemoFiles) -> None:
    records = Ledger(files.artifacts).records()
    assert [(record.kind, record.status) for record in records] == [
        ("sft", Status.COMPLETED), ("rl", Status.COMPLETED)
    ]  # fmt: skip
    for config in (files.sft, files.rl):
        assert is_complete(Path(resolve_checkpoint(config)), verify=True)


def test_the_table_shows_the_progress_and_what_to_type_next(
    printed: str, home: Path, summary: dict[str, Any]
) -> None:
    shown = dict(re.findall(r"before iteration +(\d+) +\S* +([\d.]+)", printed))
    assert {int(step): float(reward) for step, reward in shown.items()} == pytest.approx(
        summary["held_out_by_iteration"], abs=5e-4
    )
    assert "20,480 rollouts, 0 failed, 0 alerts; checkpoints 000040, 000080" in printed
    page, query, again = printed.partition("\nnext:\n")[2].splitlines()
    report = home / shlex.split(page, comments=True)[1]
    assert "<html" in report.read_text()[:500]
    asked = typed(home, *shlex.split(query))
    assert asked.returncode == 0 and "eval/test" in asked.stdout, asked.stderr
    program, command, config, *words = shlex.split(again)
    assert (program, command) == ("rollbook", "rl")
    assert load_settings(home / config, words).loss == PpoClip()


def test_a_directory_with_something_in_it_is_refused(home: Path, printed: str) -> None:
    done = typed(home, "rollbook", "demo")
    assert done.returncode == 2
    assert "demo is not empty; name another directory: rollbook demo demo-2" in done.stderr
