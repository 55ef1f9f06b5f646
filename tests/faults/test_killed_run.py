"""A run that is killed anywhere, many times, and resumed, leaves what an uninterrupted one leaves."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rollbook
from faults.harness import Victim, seeded
from rollbook import open_run
from rollbook.errors import RollbookError
from rollbook.records.complete import COMPLETE
from rollbook.records.layout import Artifact, IterationFile, RunFiles
from rollbook.runs.follow import Follower

TIMES = {"logged_at", "saved_at", "raised_at", "run_id", "started_at", "files"}
KILLS_A_RUN = 10
ASIDE = ("superseded/", "run.json", "code.diff")


def content(path: Path) -> dict[str, Any]:
    """Every file of the run, times and run ids aside."""
    run_id = open_run(path).id
    found: dict[str, Any] = {}
    for file in sorted(path.rglob("*")):
        name = file.relative_to(path).as_posix()
        if not file.is_file() or name.startswith(ASIDE):
            continue
        if file.suffix == ".jsonl":
            found[name] = [without_times(json.loads(line)) for line in file.read_bytes().splitlines()]
        elif file.suffix == ".json":
            found[name] = without_times(json.loads(file.read_bytes()))
        elif file.name == COMPLETE:
            found[name] = COMPLETE
        else:
            text = file.read_text().replace(run_id, "RUN")
            found[name] = re.sub(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[\d.]*(Z|\+00:00| UTC)?", "TIME", text)
    return found


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key not in TIMES}
    if isinstance(value, list):
        return [without_times(item) for item in value]
    return value


class Watcher:
    """Follows the run all the time, as a live view does, and drops what it is told to drop."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.follower: Follower | None = None
        self.records: dict[str, list[Any]] = {}

    def look(self) -> bool:
        if self.follower is None:
            try:
                self.follower = open_run(self.path).follow()
            except RollbookError:
                return False  # nothing there yet
        updates = self.follower.poll()
        for update in updates:
            seen = self.records.setdefault(update.path.relative_to(self.path).as_posix(), [])
            if update.restarted:
                seen.clear()
            seen += update.records
        return bool(updates)

    def counts(self) -> dict[str, int]:
        while self.look():
            pass
        return {name: len(records) for name, records in self.records.items() if records}


def live_once(arguments: tuple[object, ...], lifetime: float | None, watcher: Watcher) -> bool:
    """One process; True when it came to the end of the run before it was killed."""
    with Victim("training_process.py", *arguments) as victim:
        victim.wait_until_ready()
        deadline = None if lifetime is None else time.monotonic() + lifetime
        while (deadline is None or time.monotonic() < deadline) and not victim.has_ended():
            watcher.look()
            time.sleep(0.005)
        return victim.kill_unless_done()


def kill_and_resume(path: Path, iterations: int, layout: str, kills: int, choose: random.Random) -> int:
    """Live through at most `kills` kills and then to the end; returns how many there were."""
    watcher = Watcher(path)
    arguments = (path, iterations, layout)
    for done in range(kills):
        if live_once(arguments, choose.uniform(0, choose.choice([0.2, 0.6, 1.5])), watcher):
            kills = done
            break
    else:
        assert live_once(arguments, None, watcher)
    files = {name: rows for name, rows in content(path).items() if name.endswith(".jsonl")}
    files.pop("token_exports/rank_0.jsonl", None)  # of the loop's own: nobody follows it
    assert watcher.counts() == {name: len(rows) for name, rows in files.items() if rows}
    return kills


def survive(tmp_path: Path, kills: int, iterations: int, layouts: list[str]) -> None:
    with seeded("killed runs") as choose:
        expected = {}
        for layout in layouts:
            path = tmp_path / layout
            assert live_once((path, iterations, layout), None, Watcher(path))
            expected[layout] = content(path)
        killed = campaign = 0
        while killed < kills:
            layout = layouts[campaign % len(layouts)]
            path = tmp_path / f"killed_{campaign}"
            killed += kill_and_resume(path, iterations, layout, min(KILLS_A_RUN, kills - killed), choose)
            compare(content(path), expected[layout])
            campaign += 1
        print(f"{killed} kills in {campaign} runs of {iterations} iterations")


def compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        assert found[name] == value, f"{name} differs"


def test_what_a_killed_write_left_goes_on_resume(tmp_path: Path) -> None:
    for name in (".run.json.0123456789ab.tmp", "iteration_000000/.train_logtree.json.0123456789ab.tmp"):
        with rollbook.Run(tmp_path, resume=True, layout="nested", code=tmp_path) as run:
            with run.rollouts(0):
                pass
            run.record_checkpoint(f"after-{run.attempt}", batch=1)
        (tmp_path / name).touch()
        with rollbook.Run(tmp_path, resume=True, layout="nested", code=tmp_path):
            assert not (tmp_path / name).exists()


def test_a_follower_bears_a_file_that_leaves_while_it_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a resume does, which sets the files of later iterations aside."""
    with rollbook.Run(tmp_path, code=tmp_path) as run, run.rollouts(0) as rollouts, rollouts.group() as group:
        group.add(rollbook.Trajectory.single_turn("?", "!", reward=1.0))
    follower = open_run(tmp_path).follow()
    assert any(update.records for update in follower.poll())
    leaving = run.files.iteration("train", 0, Artifact.SUMMARIES)
    listed = RunFiles.iteration_files

    def list_and_lose(files: RunFiles) -> Iterator[IterationFile]:
        found = list(listed(files))
        leaving.unlink(missing_ok=True)
        return iter(found)

    monkeypatch.setattr(RunFiles, "iteration_files", list_and_lose)
    updates = follower.poll() + follower.poll()
    assert [(update.path, update.records, update.restarted) for update in updates] == [(leaving, [], True)]


def test_a_few_kills(tmp_path: Path) -> None:
    survive(tmp_path, kills=4, iterations=8, layouts=["flat"])


@pytest.mark.faults
def test_forty_kills(tmp_path: Path) -> None:
    survive(tmp_path, kills=40, iterations=25, layouts=["flat", "nested"])
