"""No child of ours imports a module from the working directory that has the name of one of Python's."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rollbook
from collecting import config, expected_keys, keys, run, small_input
from rollbook.envs.workers import Workers
from rollbook.runs.children import forget_own_path, python_command, python_environment
from rollbook.runs.jobs.detach import supervise_detached
from rollbook.runs.jobs.job import Job
from rollbook.runs.jobs.ledger import Ledger
from rollbook.runs.jobs.snapshot import take_snapshot
from supervision import poll

SHADOWED = ("random", "json", "asyncio", "struct", "re", "msgspec", "orjson", "platform", "rollbook")
SOURCE = Path(rollbook.__file__).parents[1]


@pytest.fixture
def shadowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, with files that leave a mark when they are imported."""
    directory = tmp_path / "work"
    directory.mkdir()
    for name in SHADOWED:
        (directory / f"{name}.py").write_text(
            f"open({str(tmp_path / 'imported')!r}, 'a').write({name + ' '!r})\nraise ImportError('planted')\n"
        )
    monkeypatch.chdir(directory)
    monkeypatch.setenv("ROLLBOOK_ARTIFACTS", str(tmp_path / "artifacts"))
    yield directory
    imported = tmp_path / "imported"
    assert not imported.exists(), f"imported from the working directory: {imported.read_text()}"


def test_the_planted_modules_would_be_imported(shadowed: Path, tmp_path: Path) -> None:
    said = subprocess.run([sys.executable, "-m", "rollbook.envs.worker"], capture_output=True, text=True)
    assert said.returncode != 0
    assert (tmp_path / "imported").exists()
    (tmp_path / "imported").unlink()


def test_processes_that_grade(shadowed: Path) -> None:
    async def grade() -> object:
        workers = Workers()
        try:
            return await workers.do("search", patterns=["a+"], text="baaa", flags=0)
        finally:
            await workers.close()

    assert asyncio.run(grade())


def test_workers_of_a_collection_still_find_modules_of_the_user(shadowed: Path, tmp_path: Path) -> None:
    small_input(tmp_path, 6)
    (shadowed / "sums_of_mine.py").write_text(
        "import random\nasync def act(request):\n    random.random()\n    return {'content': '2'}\n"
    )
    config(tmp_path, {"kind": "scripted", "script": "sums_of_mine.py:act"})
    run(tmp_path, "workers=2")
    assert set(keys(tmp_path / "out.jsonl")) == expected_keys(6)


def test_a_detached_supervisor_and_its_guardian(
    shadowed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SOURCE) + os.pathsep + "/elsewhere")
    command = ["sh", "-c", f'echo "$PYTHONPATH" > {tmp_path}/path']
    started = supervise_detached(Job(name="demo", command=command, artifacts=tmp_path / "artifacts"))
    ledger = Ledger(tmp_path / "artifacts")
    poll(lambda: not ledger.get(started.id).is_running)
    assert ledger.get(started.id).status == "completed"
    # A command of the user's may belong to another installation: nothing of ours is on its path.
    assert (tmp_path / "path").read_text().strip() == str(SOURCE) + os.pathsep + "/elsewhere"


def test_the_list_of_installed_packages(shadowed: Path, tmp_path: Path) -> None:
    job = Job(name="demo", command=[sys.executable, "-c", "pass"], artifacts=tmp_path / "artifacts")
    assert "versions.json" not in take_snapshot(tmp_path / "archive", job).missing


def test_the_path_is_ours_only_while_it_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    for before in (None, "/elsewhere"):
        environment = python_environment({} if before is None else {"PYTHONPATH": before})
        assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(SOURCE)
        monkeypatch.setattr(os, "environ", dict(environment))
        forget_own_path()
        assert os.environ == ({} if before is None else {"PYTHONPATH": before})


def test_every_python_child_is_started_in_one_way() -> None:
    """`sys.executable` is used to start a child in `children`, and to name the interpreter in `snapshot`."""
    users = {
        path.relative_to(SOURCE).as_posix()
        for path in (SOURCE / "rollbook").rglob("*.py")
        if re.search(r"\bsys\.executable\b", path.read_text())
    }
    assert users == {"rollbook/runs/children.py", "rollbook/runs/jobs/snapshot.py"}
    assert python_command("a.b", "c") == [sys.executable, "-P", "-m", "a.b", "c"]
