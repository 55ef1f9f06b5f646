"""Outputs of runs in a repository that does not ignore them, tracked or not: never a part of code.diff."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from rollbook.records.code_state import capture_code


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "config", "user.email", "a@b")
    git(tmp_path, "config", "user.name", "a")
    (tmp_path / "train.py").write_text("a = 1\n")
    for number in range(12):
        run = tmp_path / "runs" / str(number)
        run.mkdir(parents=True)
        for name in ("config.json", "metrics.jsonl", "notes.py"):
            (run / name).write_text("of a former run\n" * 100)
    (tmp_path / "artifacts" / "archives").mkdir(parents=True)
    (tmp_path / "artifacts" / "index.yaml").write_text("runs:\n")
    (tmp_path / "artifacts" / "archives" / "code.diff").write_text("of a former diff\n")
    endings = ("_failures.ndjson", "_tasks.ndjson", "_failures.jsonl", "_manifest.json", "_progress.json")
    for name in ("w.jsonl", *(f"w{ending}" for ending in endings)):
        (tmp_path / name).write_text("{}\n")
    return tmp_path


def git(repo: Path, *words: str) -> None:
    subprocess.run(["git", *words], cwd=repo, check=True, capture_output=True)


def edit(repo: Path) -> None:
    for path in repo.rglob("*"):
        if path.is_file() and ".git" not in path.parts:
            path.write_text(path.read_text() + "newly written\n")


@pytest.mark.parametrize("tracked", [True, False])
def test_the_output_of_earlier_runs(tracked: bool, repo: Path) -> None:
    if tracked:
        git(repo, "add", "-A")
        git(repo, "commit", "--quiet", "-m", "everything")
        edit(repo)
    text = capture_code(repo).text
    code = text.partition("### left out")[0]
    assert "of a former" not in text
    assert code.count("newly written") == tracked  # train.py
    for output in ("runs/0/", "artifacts/", "w*"):
        assert text.count(f"#   {output} (") == 1
    assert len(text) < 4000


def test_a_file_of_rows_that_no_collection_wrote_is_not_taken_for_one(repo: Path) -> None:
    (repo / "mine.jsonl").write_text("{}\n")
    assert "mine.jsonl (3 B): not called like source" in capture_code(repo).text
