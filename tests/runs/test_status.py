"""How a run stands, by the last lines of whatever its trainer writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from rollbook.runs.status import read_status


def write_log(directory: Path, rows: list[dict[str, Any]]) -> None:
    (directory / "trainer_log.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))


def row(step: int, **values: float) -> dict[str, Any]:
    return {"current_steps": step, "total_steps": 40, **values}


@pytest.mark.parametrize(
    ("names", "headline"),
    [(("loss",), "loss"), (("loss", "reward"), "reward"), (("reward", "env/all/reward/total", "loss"), None)],
)
def test_the_headline_of_a_run_with_rewards_is_the_reward(
    names: tuple[str, ...], headline: str | None, tmp_path: Path
) -> None:
    write_log(tmp_path, [row(step, **dict.fromkeys(names, step / 10)) for step in range(1, 11)])
    status = read_status(tmp_path)
    assert status.headline == (headline or "env/all/reward/total")
    assert (status.step, status.percent, status.value, status.trend) == (10, 25.0, 1.0, "rising")


def test_a_log_without_numbers_has_no_headline(tmp_path: Path) -> None:
    write_log(
        tmp_path, [row(1), {"current_steps": 2, "total_steps": 40, "loss": None, "nonfinite": ["loss"]}]
    )
    status = read_status(tmp_path)
    assert (status.headline, status.value, status.step) == (None, None, 2)
    assert status.nonfinite == ["loss"]


def test_times_that_are_no_text_give_no_eta(tmp_path: Path) -> None:
    rows = [{"step": step, "progress/done_frac": (step + 1) / 10, "logged_at": step} for step in range(3)]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    status = read_status(tmp_path)
    assert (status.step, status.percent, status.eta_s) == (3, 30.0, None)
