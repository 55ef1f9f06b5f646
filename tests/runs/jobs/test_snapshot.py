"""What a run was started with is kept, without its secrets, and nothing about keeping it can stop the run."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from rollbook.runs.jobs import fingerprint
from rollbook.runs.jobs.fingerprint import Fingerprinter
from rollbook.runs.jobs.job import Job, decode_job, encode_job
from rollbook.runs.jobs.snapshot import capture_job_code, git_of, interpreter_of, take_snapshot

SECRET = "k3y-0123456789abcdef"


def job(root: Path, **fields: Any) -> Job:
    settings = {"command": [sys.executable, "train.py"], **fields}
    return Job(name="demo", artifacts=root / "artifacts", **settings)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    path = tmp_path / "repository"
    path.mkdir()
    (path / "train.py").write_text("lr = 1\n")
    git = ["git", "-c", "user.name=n", "-c", "user.email=e@example.org"]
    for words in (["init", "-q", "-b", "trunk"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *words], cwd=path, check=True)
    return path


def test_everything_is_there(tmp_path: Path, repository: Path) -> None:
    (repository / "train.py").write_text("lr = 2\n")
    (tmp_path / "data.jsonl").write_text('{"a": 1}\n')
    config = tmp_path / "config.yaml"
    config.write_text(f"lr: 1  # comment\napi_key: {SECRET}\n")
    archive = tmp_path / "archive"
    taken = take_snapshot(
        archive,
        job(
            tmp_path,
            command=[sys.executable, "train.py", "--api-key", SECRET],
            cwd=repository,
            config={"lr": 1, "api_key": SECRET},
            config_path=config,
            data=[tmp_path / "data.jsonl"],
            env={"CUDA_VISIBLE_DEVICES": "0,1", "MY_API_KEY": SECRET},
        ),
    )
    assert taken.missing == {}
    summary = json.loads((archive / "snapshot.json").read_bytes())
    assert set(summary["files"]) == {path.name for path in archive.iterdir()} - {"snapshot.json"}
    assert not any(SECRET in path.read_text() for path in archive.iterdir())
    assert "+lr = 2" in (archive / "code.diff").read_text()
    assert json.loads((archive / "config.json").read_bytes())["lr"] == 1
    assert (archive / "config.yaml").read_text() == 'lr: 1  # comment\napi_key: "[redacted]"\n'
    command = json.loads((archive / "command.json").read_bytes())
    assert command["command"] == [sys.executable, "train.py", "--api-key", "[redacted]"]
    assert command["cwd"] == str(repository)
    assert command["env"]["CUDA_VISIBLE_DEVICES"] == "0,1"
    versions = json.loads((archive / "versions.json").read_bytes())
    assert versions["packages"]["msgspec"]
    host = json.loads((archive / "host.json").read_bytes())
    assert host["cpus"] >= 1 and host["memory_bytes"] > 1 << 20
    (data,) = json.loads((archive / "data.json").read_bytes())
    assert data["sha256"] == hashlib.sha256(b'{"a": 1}\n').hexdigest()


def test_what_cannot_be_captured_is_noted(tmp_path: Path) -> None:
    missing = job(
        tmp_path, command=["/no/such/python"], cwd=tmp_path / "nowhere", config_path=tmp_path / "none.yaml"
    )
    taken = take_snapshot(tmp_path / "archive", missing)
    summary = json.loads((tmp_path / "archive" / "snapshot.json").read_bytes())
    assert summary["missing"] == taken.missing
    assert "FileNotFoundError" in taken.missing["config.yaml"]
    assert "host.json" in taken.files


def test_a_directory_that_cannot_be_written_does_not_raise(tmp_path: Path) -> None:
    (tmp_path / "archive").write_text("a file")
    taken = take_snapshot(tmp_path / "archive", job(tmp_path))
    assert taken.files == []
    assert "snapshot.json" in taken.missing


def test_versions_are_those_of_the_interpreter_that_runs(tmp_path: Path) -> None:
    venv.create(tmp_path / "other", with_pip=False)
    python = str(tmp_path / "other" / "bin" / "python")
    take_snapshot(tmp_path / "archive", job(tmp_path, command=[python, "-V"]))
    versions = json.loads((tmp_path / "archive" / "versions.json").read_bytes())
    assert versions["interpreter"] == python
    assert "msgspec" not in versions["packages"]


def test_the_interpreter_behind_a_command(tmp_path: Path) -> None:
    script = tmp_path / "torchrun"
    script.write_text(f"#!{sys.executable}\nprint()\n")
    script.chmod(0o755)
    assert interpreter_of([str(script)]) == sys.executable
    assert interpreter_of([sys.executable, "x.py"]) == sys.executable
    assert interpreter_of(["torchrun"], path=str(tmp_path)) == sys.executable
    assert interpreter_of(["sh", "-c", "true"]) is None
    assert interpreter_of(["no-such-program"]) is None


def test_the_history_gets_the_state_of_the_scripts_repository(repository: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-u", str(repository / "train.py")]
    git = git_of(capture_job_code(job(tmp_path, command=command, cwd=tmp_path)))
    assert git is not None
    assert (len(git["sha"]), git["dirty"], git["branch"]) == (40, False, "trunk")
    (repository / "train.py").write_text("lr = 3\n")
    subprocess.run(["git", "checkout", "-q", "--detach"], cwd=repository, check=True)
    git = git_of(capture_job_code(job(tmp_path, cwd=repository)))
    assert git is not None
    assert (git["dirty"], "branch" in git) == (True, False)
    assert git_of(capture_job_code(job(tmp_path, cwd=tmp_path / "nowhere"))) is None


def test_fingerprints_say_how_they_were_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "_SAMPLE", 16)
    small, large = tmp_path / "small", tmp_path / "large"
    small.write_bytes(b"x" * 100)
    large.write_bytes(os.urandom(1000))
    printer = Fingerprinter(whole_up_to=100)
    first = printer.fingerprint(large)
    assert "sha256" in printer.fingerprint(small)
    assert "sha256" not in first and "beginning, middle" in first["sampled_how"]
    for place in (0, 500, 999):
        changed = bytearray(large.read_bytes())
        changed[place] ^= 1
        (tmp_path / "changed").write_bytes(changed)
        assert printer.fingerprint(tmp_path / "changed")["sampled"] != first["sampled"]
    spent = Fingerprinter(budget=150)
    assert ["sha256" in entry for entry in spent.files([small, small])] == [True, False]
    assert printer.fingerprint(tmp_path / "missing")["error"] == "No such file or directory"
    listing = printer.fingerprint(tmp_path)
    assert (listing["files"], listing["bytes"]) == (3, 2100)
    (tmp_path / "one more").touch()
    assert printer.fingerprint(tmp_path)["listing"] != listing["listing"]


def test_a_job_survives_the_pipe_to_a_detached_supervisor(tmp_path: Path) -> None:
    sent = job(
        tmp_path, config={"lr": 1, "token": "x"}, data=[Path("a")], cwd=tmp_path, output_dir=Path("model")
    )
    assert decode_job(encode_job(sent)) == sent
