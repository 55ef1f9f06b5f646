"""How a run begins and what it tells others: nothing half done, and nothing that costs a training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollbook import Run, open_run
from rollbook.errors import UsageError
from rollbook.runs.jobs.finish import record_result
from rollbook.runs.jobs.job import Job, Started
from rollbook.runs.jobs.ledger import RunEnd, Status


def test_a_refused_setting_leaves_no_run_behind(tmp_path: Path) -> None:
    for wrong in ({"trackers": "wandbb"}, {"config": {"trackers": ["wandbb"]}}, {"config": {1: 0, "1": 0}}):
        with pytest.raises(UsageError):
            Run(tmp_path / "run", **wrong)
        assert not (tmp_path / "run/run.json").exists()
    Run(tmp_path / "run").close()


def test_a_refused_setting_rewinds_nothing(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        run.record_checkpoint("one", batch=1)
        run.log_metrics({"loss": 1.0}, step=1)
    with pytest.raises(UsageError, match="wandbb"):
        Run(tmp_path, resume=True, trackers="wandbb")
    assert len(list(open_run(tmp_path).metrics)) == 1


def test_a_checkpoint_is_named_with_text(tmp_path: Path) -> None:
    with (
        Run(tmp_path) as run,
        pytest.raises(UsageError, match="a checkpoint's name is text, not 5"),
        run.checkpoint(5, batch=1),  # type: ignore[arg-type]
    ):
        pass


@pytest.mark.parametrize("broken_at", ["start", "end"])
def test_a_history_that_cannot_be_written_costs_an_alert(tmp_path: Path, broken_at: str) -> None:
    artifacts = tmp_path / "artifacts"
    artifacts.mkdir()
    index = artifacts / "index.yaml"
    cannot_be_appended_to = "runs:\n- {id: a}\nother: 1\n"
    if broken_at == "start":
        index.write_text(cannot_be_appended_to)
    with Run(tmp_path / "run", history=artifacts) as run:
        if broken_at == "end":
            index.write_text(cannot_be_appended_to)
        run.log_metrics({"loss": 1.0}, step=0)
    (alert,) = open_run(tmp_path / "run").alerts()
    assert alert.title == "the history was not written" and "index.yaml" in alert.text
    (attempt,) = open_run(tmp_path / "run").attempts
    assert attempt.outcome == "completed"


def test_the_first_run_of_a_command_is_the_one_it_is_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "archive"
    archive.mkdir()
    monkeypatch.setenv("ROLLBOOK_RUN_DIR", str(archive))
    for name in ("train", "eval"):
        Run(tmp_path / name).close()
    assert (archive / "output_dir").read_text() == f"{tmp_path}/train\n"


def test_a_link_that_leads_nowhere_costs_no_result(tmp_path: Path) -> None:
    output, artifacts = tmp_path / "out", tmp_path / "artifacts"
    checkpoint = output / "checkpoint-4"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": 4, "log_history": []}))
    (checkpoint / "model.safetensors").write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00{}      ")
    (checkpoint / "COMPLETE").touch()
    (checkpoint / "latest").symlink_to("gone")
    archive = artifacts / "archives/one"
    archive.mkdir(parents=True)
    job = Job(name="demo", command=["true"], artifacts=artifacts, output_dir=output)
    end = RunEnd(status=Status.COMPLETED)
    record_result(job, Started("one", artifacts / "log", archive, 1, 1), end)
    assert end.checkpoint == {"path": str(checkpoint), "step": 4}
