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
from rollbook.cli import demo
from rollbook.cli.demo import read_back
from rollbook.demo.files import HELD_OUT, DemoFiles
from rollbook.records.complete import is_complete
from rollbook.runs.handoff import resolve_checkpoint
from rollbook.runs.jobs.ledger import Ledger, Status
from rollbook.runs.settings import read_yaml

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
    assert list(summary["held_out_by_iteration"]) == [0, 15, 30, 45, 60]
    assert summary["rollouts"] == 60 * 32 * 8 and summary["failed"] == 0


def test_it_ends_without_an_alert(summary: dict[str, Any], files: DemoFiles) -> None:
    assert summary["alerts"] == []
    assert (files.run / "stalls.jsonl").read_text() == ""


def test_the_trainer_agrees_with_the_sampler_all_the_way(files: DemoFiles) -> None:
    rows = rollbook.open_run(files.run).metrics.by_step()[:-1]
    assert len(rows) == 60
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


def test_the_table_shows_the_progress_and_the_page_opens_at_a_conversation(
    printed: str, home: Path, summary: dict[str, Any]
) -> None:
    shown = dict(re.findall(r"^ +(\d+) +([\d.]+) +█", printed, re.MULTILINE))
    assert {int(step): float(reward) for step, reward in shown.items()} == pytest.approx(
        summary["held_out_by_iteration"], abs=5e-4
    )
    assert "15,360 rollouts, 0 failed, 0 alerts; checkpoints 000030, 000060" in printed
    (report,) = re.findall(r"^to read in a browser: (.*)", printed, re.MULTILINE)
    page = (home / report).read_text()
    opened = page.partition(" open>")[2].partition('<details class="s g"')[0]
    assert 'class="v"' in opened


def test_what_it_says_to_type_next_works(printed: str, home: Path, files: DemoFiles) -> None:
    wrong, again, compare = map(shlex.split, printed.partition("\nnext:\n")[2].splitlines())
    asked = typed(home, *wrong)
    assert asked.returncode == 0 and asked.stdout.startswith("task_id  answer"), asked.stderr
    assert again[:2] == ["rollbook", "rl"] and again[-2] == "--artifacts"
    config, *words = again[2:-2]
    given = read_yaml(home / config)  # paths in it are relative to where the demo was typed
    given["model"]["from"] = str(home / given["model"]["from"])
    given["environments"][0]["tasks"] = str(home / given["environments"][0]["tasks"])
    given["evals"][0]["tasks"] = str(home / given["evals"][0]["tasks"])
    other = home / "demo" / "run-2"
    assert words == [f"log_path={other.relative_to(home)}", "loss.name=ppo", "minibatches=2"]
    rollbook.rl(
        given, f"log_path={other}", "loss.name=ppo", "minibatches=2", "iterations=1", log=lambda _: None
    )
    compared = typed(home, *compare)
    assert "loss.name: 'importance_sampling' -> 'ppo'" in compared.stdout, compared.stderr


def test_a_program_that_is_not_on_the_path_is_called_by_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "rollbook"
    program.parent.mkdir()
    program.touch(mode=0o755)
    monkeypatch.setattr(sys, "argv", [str(program)])
    monkeypatch.setenv("PATH", str(program.parent))
    assert demo._program() == "rollbook"
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir(tmp_path)
    assert demo._program() == "bin/rollbook"


def test_a_directory_with_something_in_it_is_refused(home: Path, printed: str) -> None:
    done = typed(home, "rollbook", "demo")
    assert done.returncode == 2
    assert "demo is not empty; name another directory: rollbook demo demo-2" in done.stderr
