"""A run of today sees the samples, and gets the losses, that the stored run got."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sft.losses_of_50_steps import RUNS, STORED, losses


@pytest.mark.parametrize("name", RUNS)
def test_the_losses_of_50_steps_are_those_that_were_stored(name: str, tmp_path: Path) -> None:
    stored = json.loads(STORED.read_text())[name]
    now = losses(tmp_path, RUNS[name])
    assert [point[0] for point in now] == [point[0] for point in stored]
    for point, was in zip(now, stored, strict=True):
        assert point[1:] == pytest.approx(was[1:], abs=1e-5, rel=1e-5), f"step {was[0]}"
