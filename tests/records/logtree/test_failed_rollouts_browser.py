"""A report with a failed rollout, as it looks: its reason can be read, and every trajectory counts once."""

from __future__ import annotations

from pathlib import Path

import pytest

from browser import Browser
from rollbook import Run, Trajectory

WHY = (
    "the sandbox did not answer within 30 seconds after the request was sent, and then it was tried again "
    * 3
)
CELL = "[...document.querySelectorAll('td')].find(cell => cell.textContent.includes('RuntimeError'))"


@pytest.fixture
def page_of_a_run(tmp_path: Path) -> Path:
    metrics = {"correct": 1.0, "format": 1.0, "length_penalty": 0.2, "some_other_metric": 0.5}
    run = Run(tmp_path, num_groups_to_log=4)
    with run, run.rollouts(0) as rollouts, rollouts.group(0, size=3) as group:
        group.add(Trajectory.single_turn("2 + 2?", "4", 1.0, metrics=metrics, stop_reason="stop"))
        with group.trajectory(1):  # whose own log is a section beside its conversation
            group.add(Trajectory.single_turn("2 + 2?", "5", 0.0, metrics=metrics), 1)
        group.fail(RuntimeError(WHY))
    return tmp_path / "train_iteration_000000.html"


def test_each_trajectory_is_counted_once(page_of_a_run: Path) -> None:
    assert "1 group · 3 trajectories" in page_of_a_run.read_text()


@pytest.mark.parametrize("width", [700, 900, 1280])
def test_the_reason_of_a_failure_is_in_sight(width: int, page_of_a_run: Path, browser: Browser) -> None:
    with browser.page(width=width) as page:
        page.open(page_of_a_run.as_uri())
        page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
        page.evaluate(f"{CELL}.scrollIntoView()")
        height, line = (
            page.evaluate(f"{CELL}.getBoundingClientRect().height"),
            page.evaluate(f"parseFloat(getComputedStyle({CELL}).lineHeight)"),
        )
        assert height < 12 * line  # one character a line would be hundreds
        left = page.evaluate(f"{CELL}.getBoundingClientRect().left")
        box = page.evaluate(f"{CELL}.closest('.t').getBoundingClientRect().right")
        assert left + 100 < box  # its beginning stands in the part that shows without scrolling
        assert page.complaints == []
