"""Things that a person meets in the first hour: help, near misses, odd names, a package that is not there."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollbook import Run, open_run
from rollbook.errors import UsageError
from rollbook.records.metrics import normalize
from rollbook.runs.plots import curves_of, smooth

ROLLBOOK = [sys.executable, "-c", "from rollbook.cli.main import main; main()"]
WITHOUT_TORCH = [
    sys.executable,
    "-c",
    "import sys, importlib.abc\n"
    "class Absent(importlib.abc.MetaPathFinder):\n"
    "    def find_spec(self, name, path=None, target=None):\n"
    "        if name.partition('.')[0] in ('torch', 'transformers'):\n"
    "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
    "sys.meta_path.insert(0, Absent())\n"
    "from rollbook.cli.main import main; main()",
]


def run(*words: str | bytes, directory: Path, program: list[str] = ROLLBOOK) -> tuple[int, str]:
    done = subprocess.run(
        [*program, *words], cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    return done.returncode, done.stdout.decode("utf-8", "backslashreplace")


@pytest.mark.parametrize("words", [["status"], ["history", "show"], ["data"], ["data", "merge"], ["query"]])
def test_dash_h_is_help(words: list[str], tmp_path: Path) -> None:
    code, said = run(*words, "-h", directory=tmp_path)
    assert code == 0, said
    assert "usage: rollbook " in said.lower()


@pytest.mark.parametrize(
    ("typed", "meant"), [("histroy", "history"), ("stat", "status"), ("export", None), ("view", None)]
)
def test_a_near_command_is_suggested_and_a_far_one_is_not(
    typed: str, meant: str | None, tmp_path: Path
) -> None:
    code, said = run(typed, directory=tmp_path)
    assert code == 2
    assert ("did you mean" in said) == (meant is not None)
    assert meant is None or f"did you mean `rollbook {meant}`" in said


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("agent=w", "agent_name"),
        ("agents_name=w", "agent_name"),
        ("agnets={a: 1}", "agents"),
        ("limt=3", "limit"),
    ],
)
def test_the_key_that_was_meant_is_suggested(word: str, meant: str, tmp_path: Path) -> None:
    code, said = run("collect", word, "output_jsonl_fpath=o.jsonl", directory=tmp_path)
    assert code == 2
    assert f"did you mean '{meant}'?" in said


CONFIG = """
model: {config: {model_type: llama}, tokenizer: tokenizer}
data: {train: [{path: train.jsonl}]}
training: {output_dir: demo}
"""


@pytest.mark.parametrize("command", ["sft", "demo"])
def test_without_torch_it_says_what_to_type_and_enters_no_run(command: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    words = ["config.yaml"] if command == "sft" else ["here"]
    code, said = run(command, *words, directory=tmp_path, program=WITHOUT_TORCH)
    assert code == 1
    assert "pip install 'rollbook[train]'" in said
    assert "Traceback" not in said
    assert not (tmp_path / "artifacts" / "index.yaml").exists()


def test_a_path_that_is_not_utf_8_is_a_path(tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"od\xffd")
    odd.mkdir()
    with Run(odd / "run", num_groups_to_log=0) as writing:
        writing.log_metrics({"loss": 1.0}, step=0)
        writing.log_metrics({"loss": 2.0}, step=1)
    there = os.fsencode(odd)
    for words in (
        ["run", "a", "--output-dir", there + b"/run", "--", "true"],
        ["status", "a"],
        ["status", "a", "--json"],
        ["history", "show", "a"],
        ["history", "show", "a", "--json"],
        ["history", "--json"],
        ["query", "select loss from metrics", there],
        ["query", "select loss, file from metrics", there, "--format", "json"],
        ["diff", there + b"/run", there + b"/run"],
        ["plot", there + b"/run"],
        ["plot", there + b"/run", "--json"],
        ["data", "stats", there],
        ["audit", there + b"/run"],
    ):
        _, said = run(*words, directory=tmp_path)
        assert "Traceback" not in said, (words, said)


def test_a_metric_without_a_name_is_refused_and_one_that_is_there_spoils_no_query(tmp_path: Path) -> None:
    with Run(tmp_path / "run") as writing:
        with pytest.raises(UsageError, match="a metric of step 0 has no name"):
            writing.log_metrics({"": 1.0}, step=0)
        writing.log_metrics({"loss": 1.0}, step=0)
    log = tmp_path / "run" / "metrics.jsonl"
    log.write_text(log.read_text().replace('"loss":1.0', '"":7.0,"loss":1.0'))
    code, said = run("query", "select loss from metrics", "run", "--format", "csv", directory=tmp_path)
    assert (code, said) == (0, "loss\n1.0\n")


def test_a_value_that_is_not_finite_keeps_its_mark_under_the_documented_name(tmp_path: Path) -> None:
    row: dict[str, Any] = {"step": 3, "optim/entropy": None, "loss": None}
    row["nonfinite"] = ["optim/entropy", "loss"]
    assert normalize(row)["nonfinite"] == ["entropy", "loss"]


def test_the_smoothed_curve_runs_through_the_points() -> None:
    falling = [4.0 - 0.02 * step for step in range(100)]
    assert max(abs(a - b) for a, b in zip(smooth(falling), falling, strict=True)) < 0.2
    steep = [4.0 * math.exp(-step / 5) + 2.0 for step in range(40)]
    assert smooth(steep)[-1] == pytest.approx(2.0, abs=0.05)
    assert smooth([1.0] * 7) == pytest.approx([1.0] * 7)
    gap = smooth([1.0, math.nan, 3.0])
    assert all(map(math.isfinite, gap)) and 1.0 < gap[1] < 3.0
    assert math.isnan(smooth([math.nan])[0])


def test_a_plot_draws_what_was_measured(tmp_path: Path) -> None:
    with Run(tmp_path / "run") as writing:
        for step in range(3):
            writing.log_metrics({"my/number": step / 2}, step=step)
    names = {curve.name for curve in curves_of(tmp_path / "run")}
    assert "my/number" in names
    assert not names & {"attempt", "step", "logged_at"}


def test_a_diff_compares_one_step_with_the_same_step(tmp_path: Path) -> None:
    for name, steps in (("a", 5), ("b", 3), ("c", 1)):
        with Run(tmp_path / name) as writing:
            for step in range(steps):
                own = {"late": 9.0} if step == 4 else {"early": 1.0} if name == "c" else {}
                writing.log_metrics({"loss": 10.0 * (name == "a") + step, **own}, step=step)
    code, said = run("diff", "a", "b", directory=tmp_path)
    assert code == 0, said
    assert "loss at step 2: 12 -> 2  (-10)" in said
    assert "late (no step" not in said and "late: 9 -> None" in said
    told = json.loads(run("diff", "a", "b", "--json", directory=tmp_path)[1])
    assert (told["metrics"]["loss"], told["steps"]["loss"]) == ([12.0, 2.0], [2, 2])
    assert open_run(tmp_path / "a").metrics is not None
