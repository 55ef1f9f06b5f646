"""Others write the config too, with our lock or without it; nobody's edit is lost."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollbook.records.locks import FileLock, lock_path
from rollbook.runs.handoff import HandoffResult, HandoffState, handoff, publish, read_handoff
from runs.handoff.handoff_samples import CONFIG, PUBLISHED, demo, hand_over, make_project, only


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return make_project(tmp_path)


def edit_during(monkeypatch: pytest.MonkeyPatch, edits: Iterator[Callable[[], None]]) -> None:
    """Runs one edit each time the new text has been made from what was read."""
    real = handoff.set_block

    def set_then_edit(text: str, path: Any, values: Any) -> str:
        result = real(text, path, values)
        next(edits, lambda: None)()
        return result

    monkeypatch.setattr(handoff, "set_block", set_then_edit)


def test_an_edit_between_reading_and_replacing_is_kept(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = project / "config.yaml"

    def save_in_place() -> None:
        config.write_text(CONFIG.replace("notes", "edited"))

    def save_by_rename() -> None:
        (project / "swap").write_text(CONFIG.replace("notes", "edited again"))
        (project / "swap").replace(config)

    edit_during(monkeypatch, iter([save_in_place, save_by_rename]))
    assert hand_over(project).state is HandoffState.WRITTEN
    assert config.read_text() == PUBLISHED.replace("notes", "edited again")


def test_an_edit_that_breaks_the_file_is_kept_and_the_block_goes_aside(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = project / "config.yaml"
    edit_during(monkeypatch, iter([lambda: config.write_text("half a {") and None]))
    assert hand_over(project).state is HandoffState.ASIDE
    assert config.read_text() == "half a {"


def test_a_file_that_is_saved_without_end_is_given_up(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = project / "config.yaml"
    saves = (lambda n=n: config.write_text(f"{CONFIG}# {n}\n") and None for n in range(1000))
    edit_during(monkeypatch, saves)
    result = hand_over(project)
    assert "keeps saving" in result.reason
    assert config.read_text().startswith(CONFIG + "# ")


HOLD_LOCK = """
import sys
from pathlib import Path
from rollbook.records.locks import FileLock
lock = FileLock(Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.read()
lock.release()
"""


def test_a_lock_held_by_another_process(project: Path) -> None:
    config = project / "config.yaml"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD_LOCK, str(config)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    assert holder.stdout.readline() == "locked\n"
    refused = hand_over(project, lock_timeout_s=0.1)
    assert refused.state is HandoffState.ASIDE
    assert f"pid {holder.pid}" in refused.reason
    assert config.read_text() == CONFIG

    answers: list[HandoffResult] = []
    waiting = threading.Thread(target=lambda: answers.append(hand_over(project, lock_timeout_s=60)))
    waiting.start()
    holder.stdin.close()
    waiting.join()
    holder.wait()
    assert answers[0].state is HandoffState.WRITTEN
    assert config.read_text() == PUBLISHED


def test_the_lock_of_a_link_is_the_lock_of_its_file(project: Path) -> None:
    (project / "link.yaml").symlink_to("config.yaml")
    lock = FileLock(project / "config.yaml")
    try:
        assert hand_over(project, config="link.yaml", lock_timeout_s=0).state is HandoffState.ASIDE
    finally:
        lock.release()
    assert not lock_path(project / "config.yaml").exists()


def _publish_steps(project: Path, steps: int) -> None:
    for _ in range(5):
        publish(
            project / "config.yaml", demo(project, total_steps=steps), fallback=project / f"aside-{steps}"
        )


def test_many_publishers_at_once_leave_one_whole_result(project: Path) -> None:
    context = multiprocessing.get_context("fork")
    children = [
        context.Process(target=_publish_steps, args=(project, steps)) for steps in (101, 102, 103, 104)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()
    text = (project / "config.yaml").read_text()
    steps = read_handoff(project / "config.yaml")["training_metrics"]["total_steps"]
    assert text == PUBLISHED.replace("total_steps: 24", f"total_steps: {steps}")
    assert only(project) == ["artifacts", "config.yaml"]
