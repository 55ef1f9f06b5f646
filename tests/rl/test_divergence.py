"""A run whose steps are not finite any more has failed, and is remembered to have been so on a resume."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.rl_runs import config_of, write_setup
from rollbook.records.run_info import read_run_info
from rollbook.rl.settings import load_settings
from rollbook.rl.train import train
from rollbook.runs.divergence import DivergedError
from rollbook.train.losses import ImportanceSampling, LossInputs, LossOutput

QUIET: Any = lambda _: None  # noqa: E731


class Bursting(ImportanceSampling, tag="bursting"):
    """Infinite as long as it is told to be."""

    bursts = False

    def __call__(self, inputs: LossInputs) -> LossOutput:
        made = super().__call__(inputs)
        return made._replace(loss_sum=made.loss_sum * torch.inf) if self.bursts else made


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_setup(tmp_path_factory.mktemp("rl"))


def run(setup: Path, path: Path, *, bursts: tuple[int, ...], resume: bool = False, **changes: Any) -> None:
    """A run whose steps are infinite in these iterations."""

    def log(text: str) -> None:
        if found := re.match(r" *(\d+)/\d+ ", text):  # the line of an iteration that is over
            Bursting.bursts = int(found[1]) + 1 in bursts

    Bursting.bursts = False
    given = {"save_every": 1, "evals": [], "groups_per_batch": 8, **changes}
    settings = load_settings(config_of(setup, path, **given), loss=Bursting())
    train(settings, resume=resume, log=log)


def applied(path: Path) -> list[float]:
    return [json.loads(line)["optim/applied"] for line in (path / "metrics.jsonl").open()]


def test_a_run_that_diverges_has_failed_and_saves_nothing_more(setup: Path, tmp_path: Path) -> None:
    with pytest.raises(
        DivergedError, match=r"4 of the last 6 optimiser steps .* max_nonfinite_steps allows 3"
    ):
        run(setup, tmp_path / "run", bursts=(2, 3, 4, 5), iterations=8)
    assert applied(tmp_path / "run") == [1, 1, 0, 0, 0, 0]
    attempt = read_run_info(tmp_path / "run/run.json").attempts[-1]
    assert attempt.outcome == "failed" and "the run has diverged" in str(attempt.error)
    saved = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert saved == ["000001", "000002", "000003", "000004", "000005"]
    alerts = [json.loads(line) for line in (tmp_path / "run/alerts.jsonl").open()]
    assert (alerts[-1]["title"], alerts[-1]["level"]) == ("the run has diverged", "error")


def test_few_of_them_are_left_out_and_a_resume_remembers_them(setup: Path, tmp_path: Path) -> None:
    run(setup, tmp_path / "run", bursts=(1, 2, 3), iterations=5)
    assert applied(tmp_path / "run") == [1, 0, 0, 0, 1]
    with pytest.raises(DivergedError, match="4 of the last 7 optimiser steps"):
        run(setup, tmp_path / "run", bursts=(6,), iterations=9, resume=True)
    run(setup, tmp_path / "run", bursts=(6,), iterations=9, resume=True, max_nonfinite_steps=4)
    assert len(applied(tmp_path / "run")) == 9


def test_a_last_step_that_was_not_finite_is_no_end(setup: Path, tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match="the last optimiser step was not finite"):
        run(setup, tmp_path / "run", bursts=(2,), iterations=3)
    assert not (tmp_path / "run/checkpoints/000003").exists()
