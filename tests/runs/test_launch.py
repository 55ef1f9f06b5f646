"""A job that trains is started with its settings and options, and nothing of where it is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollbook.runs.jobs.ledger import Ledger, RunEnd, Status
from rollbook.runs.jobs.supervise import supervise
from rollbook.runs.launch import Launch
from runs.launched_job import Settings


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


def launch(settings: Settings, **options: bool) -> RunEnd:
    made = Launch(
        kind="demo",
        module="launched_job",
        settings=settings,
        name="a",
        output_dir=Path("out"),
        artifacts=Path("artifacts"),
        **options,
    )
    return supervise(made.job(), terminal=None)


@pytest.mark.parametrize(("resume", "overwrite"), [(False, False), (True, False), (False, True)])
def test_the_child_has_the_settings_and_options(resume: bool, overwrite: bool) -> None:
    Path("random.py").write_text("raise SystemExit('of the working directory')")
    text = 'é " $HOME\n\n' + "x" * 20_000
    end = launch(Settings(text=text), resume=resume, overwrite=overwrite)
    assert end.status is Status.COMPLETED, end
    found = json.loads(Path("found.json").read_text())
    assert (found["text"], found["resume"], found["overwrite"]) == (text, resume, overwrite)
    assert not found["random"].startswith(str(Path.cwd()))
    (record,) = Ledger(Path("artifacts")).records()
    assert record.kind == "demo" and text not in " ".join(record.command)


def test_an_error_of_ours_is_said_without_a_traceback() -> None:
    end = launch(Settings(text="x", fail=True))
    assert (end.status, end.exit_code) == (Status.FAILED, 7)
    (log,) = Path("artifacts/logs").iterdir()
    assert "rollbook: it was told to" in log.read_text() and "Traceback" not in log.read_text()
