"""How a run stands, by the last lines of whatever its trainer writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from rollbook.runs.standing import standing_of


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
    standing = standing_of(tmp_path)
    assert standing.headline == (headline or "env/all/reward/total")
    assert (standing.step, standing.percent, standing.value, standing.trend) == (10, 25.0, 1.0, "rising")


def test_a_log_without_numbers_has_no_headline(tmp_path: Path) -> None:
    write_log(
        tmp_path, [row(1), {"current_steps": 2, "total_steps": 40, "loss": None, "nonfinite": ["loss"]}]
    )
    standing = standing_of(tmp_path)
    assert (standing.headline, standing.value, standing.step) == (None, None, 2)
    assert standing.nonfinite == ["loss"]


def test_times_that_are_no_text_give_no_eta(tmp_path: Path) -> None:
    rows = [{"step": step, "progress/done_frac": (step + 1) / 10, "logged_at": step} for step in range(3)]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    standing = standing_of(tmp_path)
    assert (standing.step, standing.percent, standing.eta_s) == (3, 30.0, None)
