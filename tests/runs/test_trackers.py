"""A tracker that fails, hangs or is slow costs nothing but its own curve."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rollbook import Run, open_run
from rollbook.errors import UsageError
from rollbook.runs import trackers


class Recording:
    made: list[Recording] = []

    def __init__(self, run_id: str, name: str, config: object, settings: dict, directory: Path) -> None:
        self.run_id, self.config, self.settings = run_id, config, settings
        self.lines: list[tuple[dict[str, float], int]] = []
        self.closed = False
        Recording.made.append(self)

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.lines.append((metrics, step))

    def close(self) -> None:
        self.closed = True


def test_lines_arrive_under_the_runs_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trackers._KINDS, "wandb", Recording)
    with Run(tmp_path, config={"lr": 0.1}, trackers={"wandb": {"project": "p"}}) as run:
        for step in range(5):
            run.log_metrics({"loss": 1.0 / (step + 1), "note": "text", "bad": float("nan")}, step)
    tracker = Recording.made[-1]
    assert tracker.closed and tracker.run_id == run.id
    assert tracker.config == {"lr": 0.1} and tracker.settings == {"project": "p"}
    assert tracker.lines == [({"loss": 1.0 / (step + 1)}, step) for step in range(5)]
    assert open_run(tmp_path).info.extra["trackers"] == {"wandb": run.id}


def test_trackers_named_in_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trackers._KINDS, "trackio", Recording)
    with Run(tmp_path, config={"lr": 0.1, "trackers": ["trackio"]}) as run:
        run.log_metrics({"loss": 1.0}, 0)
    assert Recording.made[-1].lines == [({"loss": 1.0}, 0)]


def test_a_failing_tracker_is_one_alert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Recording):
        def log(self, metrics: dict[str, float], step: int) -> None:
            raise ConnectionError("no route to host")

    monkeypatch.setitem(trackers._KINDS, "wandb", Failing)
    with Run(tmp_path, trackers="wandb") as run:
        for step in range(100):
            run.log_metrics({"loss": 1.0}, step)
    assert len(list(open_run(tmp_path).metrics)) == 100
    (alert,) = open_run(tmp_path).alerts()
    assert alert.title == "wandb does not record this run" and "no route to host" in alert.text


def test_a_hanging_tracker_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hang = threading.Event()

    class Hanging(Recording):
        def log(self, metrics: dict[str, float], step: int) -> None:
            hang.wait(60)

    monkeypatch.setitem(trackers._KINDS, "trackio", Hanging)
    monkeypatch.setattr(trackers, "_CLOSE_TIMEOUT_S", 0.2)
    started = time.monotonic()
    with Run(tmp_path, trackers=["trackio"]) as run:
        for step in range(50):
            run.log_metrics({"loss": 1.0}, step)
    waited = time.monotonic() - started
    hang.set()
    assert waited < 30  # the tracker would have taken 3,000 s
    (alert,) = open_run(tmp_path).alerts()
    assert alert.title == "trackio did not finish" and "lines were not sent" in alert.text


def test_a_hanging_tracker_does_not_keep_the_process(tmp_path: Path) -> None:
    code = (
        "import sys, threading\n"
        "from rollbook import Run\n"
        "from rollbook.runs import trackers\n"
        "def hang(*_): threading.Event().wait()\n"
        "trackers._KINDS['wandb'], trackers._CLOSE_TIMEOUT_S = hang, 0.1\n"
        "with Run(sys.argv[1], trackers='wandb') as run: run.log_metrics({'loss': 1.0}, 0)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60).returncode == 0
    assert len(list(open_run(tmp_path).metrics)) == 1


def test_of_too_many_lines_the_latest_are_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = threading.Event()

    class Slow(Recording):
        def log(self, metrics: dict[str, float], step: int) -> None:
            begin.wait(60)
            super().log(metrics, step)

    monkeypatch.setitem(trackers._KINDS, "wandb", Slow)
    monkeypatch.setattr(trackers, "_MOST_WAITING", 10)
    with Run(tmp_path, trackers="wandb") as run:
        for step in range(100):
            run.log_metrics({"loss": 1.0}, step)
        begin.set()
    steps = [step for _, step in Recording.made[-1].lines]
    assert steps[-1] == 99 and steps == sorted(steps)
    (alert,) = open_run(tmp_path).alerts()
    assert alert.title == "wandb is slow"


def test_what_is_not_installed_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with Run(tmp_path, trackers="wandb") as run:
        run.log_metrics({"loss": 1.0}, 0)
    (alert,) = open_run(tmp_path).alerts()
    assert "pip install wandb" in alert.text
    assert "pip install" in caplog.text  # in the terminal, not only in the record


def test_tensorboard_really_records(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with Run(tmp_path, trackers="tensorboard") as run:
        run.log_metrics({"loss": 1.0}, 0)
    assert list((tmp_path / "tensorboard").glob("events.*"))


def test_unknown_tracker(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="wandb, trackio, tensorboard"):
        Run(tmp_path, trackers="wandbb")
