"""A run whose steps are not finite any more has failed: it says so, and hands nothing over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import rollbook.sft.train as story
from rollbook.cli.main import main
from rollbook.records.run_info import read_run_info
from rollbook.runs.divergence import DivergedError
from rollbook.runs.jobs.job import Job, Started
from rollbook.runs.jobs.ledger import RunEnd, Status
from rollbook.sft.llamafactory import LF_ARGUMENTS, record_llamafactory_result
from rollbook.sft.settings import load_settings
from rollbook.sft.train import train
from rollbook.train.losses import CrossEntropy, LossInputs, LossOutput
from tiny_model import write_config

OUTPUT = "artifacts/model/demo"


class Bursts(CrossEntropy, tag="bursts"):
    """Infinite in the steps that are named: one call is one step here."""

    steps: list[int]

    def __call__(self, inputs: LossInputs) -> LossOutput:
        made = super().__call__(inputs)
        self.steps[:] = [step - 1 for step in self.steps]
        return made._replace(loss_sum=made.loss_sum * torch.inf) if 0 in self.steps else made


def settings_for(directory: Path, **changes: Any) -> Any:
    given = {"training__max_steps": 12, "training__save_steps": 2, "data__eval": [], **changes}
    return load_settings(write_config(directory, **given))


def run(directory: Path, *, resume: bool = False, **changes: Any) -> list[str]:
    said: list[str] = []
    train(settings_for(directory, **changes), directory / "artifacts", resume=resume, log=said.append)
    return said


def alerts(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / OUTPUT / "alerts.jsonl").open()]


def test_seven_of_eight_steps_are_a_failed_run_without_a_handoff(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It used to end with 0, and its weights were published."""
    settings_for(tmp_path, training__max_steps=8, training__learning_rate=1e30, training__warmup_steps=1)
    before = (tmp_path / "config.yaml").read_text()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["sft", "config.yaml"])
    assert ended.value.code == 1
    said = capfd.readouterr()
    why = "the run has diverged: 4 of the last 5 optimiser steps were not finite, and training."
    assert f"rollbook: {why}max_nonfinite_steps allows 3." in said.out and "handoff" not in said.err
    assert (tmp_path / "config.yaml").read_text() == before
    with pytest.raises(SystemExit):
        main(["history", "--json"])
    (record,) = json.loads(capfd.readouterr().out)
    assert record["status"] == "failed" and why in record["error"]["message"] and "handoff" not in record
    assert alerts(tmp_path)[-1]["title"] == "the run has diverged"
    assert read_run_info(tmp_path / OUTPUT / "run.json").attempts[-1].outcome == "failed"


@pytest.mark.parametrize(("bursts", "most", "fails_at"), [
    ([2, 4, 5], 3, None), ([2, 4, 5, 7], 3, 7), ([2, 4, 5, 7], 4, None), ([3], 0, 3), ([12], 3, 12),
])  # fmt: skip
def test_how_many_may_be_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bursts: list[int], most: int, fails_at: int | None
) -> None:
    monkeypatch.setattr(story, "LOSS", Bursts(steps=list(bursts)))
    changes = {"training__max_nonfinite_steps": most}
    if fails_at is None:
        assert run(tmp_path, **changes)[-1].endswith("checkpoint-12")
        assert len(alerts(tmp_path)) == len(bursts)
        return
    with pytest.raises(DivergedError, match="the last optimiser step" if fails_at == 12 else "of the last"):
        run(tmp_path, **changes)
    saved = {path.name for path in (tmp_path / OUTPUT).glob("checkpoint-*")}
    assert saved == {f"checkpoint-{step}" for step in range(2, fails_at, 2)}


def test_a_resume_remembers_which_were_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(story, "LOSS", Bursts(steps=[1, 3, 4]))
    run(tmp_path, training__max_steps=6)
    monkeypatch.setattr(story, "LOSS", Bursts(steps=[1]))
    with pytest.raises(DivergedError, match="4 of the last 7 optimiser steps"):
        run(tmp_path, resume=True)
    monkeypatch.setattr(story, "LOSS", Bursts(steps=[1]))
    run(tmp_path, resume=True, training__max_nonfinite_steps=4)


def test_llamafactory_is_judged_by_what_it_logged(tmp_path: Path) -> None:
    """It has no such limit, ends with 0, and its trainer writes 0.0 for a loss that is not a number."""
    history = [{"step": step, "loss": 0.0, "grad_norm": float("nan")} for step in range(2, 9)]
    (tmp_path / "trainer_state.json").write_text(
        json.dumps({"global_step": 8, "log_history": [{"step": 1, "loss": 5.0, "grad_norm": 1.0}, *history]})
    )
    (tmp_path / LF_ARGUMENTS).touch()
    job = Job(
        name="lf",
        command=["lf"],
        artifacts=tmp_path,
        output_dir=tmp_path,
        config={"training": {"max_nonfinite_steps": 3}},
        config_path=tmp_path / "config.yaml",
    )
    started = Started("lf", tmp_path / "log", tmp_path, 1, 2)
    end = RunEnd(status=Status.COMPLETED, exit_code=0)
    record_llamafactory_result(job, started, end)
    assert (end.status, end.exit_code) == (Status.FAILED, 1) and "handoff" not in end.extra
    assert "7 of the last 8 optimiser steps were not finite" in str(end.reason)
