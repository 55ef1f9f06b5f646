"""A checkpoint that was damaged after it was saved is never resumed from, and that is said."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from helpers.damage import DAMAGES, change_a_byte
from rollbook import Run, open_run
from rollbook.errors import UsageError
from rollbook.runs.standing import standing_of


def train(path: Path, upto: int = 6, *, resume: bool | str = False) -> Run:
    """A loop of one's own with a checkpoint after every second iteration."""
    with Run(path, resume=resume) as run:
        for i in range(run.next_iteration, upto):
            run.log_metrics({"loss": 1 / (i + 1)}, step=i)
            if i % 2 == 1:
                with run.checkpoint(f"{i + 1:06d}", batch=i + 1) as directory:
                    (directory / "weights").write_text(f"weights after {i + 1}")
    return run


def steps(path: Path) -> list[int]:
    return [int(row["step"]) for row in open_run(path).metrics]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_resume_takes_the_newest_whole_one_and_says_so(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path)
    act, said = DAMAGES[damage]
    act(tmp_path / "checkpoints/000006/weights")
    expected = "checkpoint '000006' is passed over: " + said.format(
        file=tmp_path / "checkpoints/000006/weights"
    )
    with caplog.at_level(logging.WARNING):
        run = train(tmp_path, resume=True)
    assert run.resumed_from is not None and run.resumed_from.name == "000004"
    assert re.search(expected, caplog.text)
    (alert,) = open_run(tmp_path).alerts()
    assert alert.title == "a damaged checkpoint was passed over" and re.fullmatch(expected, alert.text)
    assert steps(tmp_path) == [0, 1, 2, 3, 4, 5]
    assert (tmp_path / "checkpoints/000006/weights").read_text() == "weights after 6"
    assert (tmp_path / "superseded/attempt_001/checkpoints/000006").exists()


def test_a_damaged_checkpoint_that_is_asked_for_is_refused(tmp_path: Path) -> None:
    train(tmp_path)
    change_a_byte(tmp_path / "checkpoints/000004/weights")
    with pytest.raises(UsageError, match=r"'000004' is not complete: .*weights was changed: its digest"):
        Run(tmp_path, resume="000004")
    assert train(tmp_path, resume="000002").resumed_from.name == "000002"  # type: ignore[union-attr]


def test_without_a_whole_one_nothing_is_begun(tmp_path: Path) -> None:
    train(tmp_path, 4)
    for name in ("000002", "000004"):
        change_a_byte(tmp_path / f"checkpoints/{name}/weights")
    said = (
        r"none of its 2 checkpoints is complete \(of the newest, .*000004/weights was changed.*'start-over'"
    )
    with pytest.raises(UsageError, match=said):
        Run(tmp_path, resume=True)
    assert steps(tmp_path) == [0, 1, 2, 3]


def test_status_looks_at_sizes(tmp_path: Path) -> None:
    train(tmp_path)
    checkpoint = standing_of(tmp_path).checkpoint
    assert checkpoint is not None and checkpoint.complete
    DAMAGES["cut off"][0](tmp_path / "checkpoints/000006/weights")
    checkpoint = standing_of(tmp_path).checkpoint
    assert checkpoint is not None and not checkpoint.complete
    assert re.search(r"000006/weights has 7 bytes instead of 15", str(checkpoint.problem))
    latest = open_run(tmp_path).latest_checkpoint()
    assert latest is not None and latest.name == "000004"
