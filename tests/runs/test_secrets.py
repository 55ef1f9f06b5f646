"""The value of a secret variable reaches no file of a run, wherever it stands in what is recorded."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rollbook import Run, Trajectory, logtree, open_run
from rollbook.records.plain import encode_document
from rollbook.runs.jobs.job import Job
from rollbook.runs.jobs.supervise import supervise

SECRETS = {
    "HF_TOKEN": "hf_abcdefghijklmnop123456",
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "DB_PASSWORD": "s3cr3t/w0rd+of=mine",
}


@pytest.fixture(autouse=True)
def _secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)


def test_no_file_holds_one(tmp_path: Path) -> None:
    text = "The environment says " + " & ".join(SECRETS.values())
    with Run(tmp_path, num_groups_to_log=1, code=tmp_path) as run:
        with run.rollouts(0) as rollouts, rollouts.group(0, task_id=text) as group:
            logtree.text(text)
            logtree.table([{"environment": SECRETS}])
            group.add(Trajectory.single_turn(text, text, 1.0, logs={"stdout": SECRETS}))
            group.fail(text)
        with run.report(0, "eval/mine", title=text):
            logtree.conversation([{"role": "user", "content": text}])
        run.log_metrics({"note": text}, step=0)
        run.append_log("own.jsonl").append(b'{"text": "%s"}' % text.encode())
        run.alert("odd", text)
        run.record_checkpoint("one", batch=1, note=text)
    for path in tmp_path.rglob("*"):
        if path.is_file():
            data = path.read_text()
            assert not [value for value in SECRETS.values() if value in data], path.name
    (transcript, _) = open_run(tmp_path).transcripts()
    assert transcript.messages[-1]["content"] == "The environment says [redacted] & [redacted] & [redacted]"


def test_a_password_that_is_a_word_leaves_the_word_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PASSWORD", "password")
    monkeypatch.setenv("OPENAI_API_KEY", "EMPTY")
    with Run(tmp_path) as run, run.rollouts(0) as rollouts, rollouts.group(0) as group:
        group.add(Trajectory.single_turn("q", "My password is EMPTY.", 1.0))
    (transcript,) = open_run(tmp_path).transcripts()
    assert transcript.messages[-1]["content"] == "My password is EMPTY."


def test_no_file_of_a_supervised_command_holds_one(tmp_path: Path) -> None:
    """Whatever it prints, however its writes are cut, and whatever the history keeps of its end."""
    code = (
        "import os, sys\n"
        f"for name in {sorted(SECRETS)}:\n"
        "    for letter in 'value: ' + os.environ[name]: os.write(1, letter.encode())\n"
        "    os.write(1, (os.environ[name] * 2)[:-1].encode() + b'\\n')\n"
        "raise ValueError(os.environ['WANDB_API_KEY'])"
    )
    config = tmp_path / "config.yaml"
    config.write_text(f"# ours\nname: demo\nnote: {SECRETS['HF_TOKEN']}\napi_key: letmein\n")
    job = Job(
        name="demo",
        command=[sys.executable, "-c", code],
        artifacts=tmp_path / "artifacts",
        cwd=tmp_path,
        config_path=config,
        extra={"told": SECRETS},
    )
    end = supervise(job, terminal=None)
    assert (end.exit_code, (end.error or {}).get("type")) == (1, "ValueError")
    files = [path for path in (tmp_path / "artifacts").rglob("*") if path.is_file()]
    for path in files:
        data = path.read_text()
        assert not [value for value in (*SECRETS.values(), "letmein") if value in data], path.name
    (log,) = (path for path in files if path.suffix == ".log")
    # What is left of the token of Hugging Face has the shape of one.
    left = {name: "[redacted]" if name == "HF_TOKEN" else SECRETS[name][:-1] for name in SECRETS}
    shown = [f"value: [redacted][redacted]{left[name]}" for name in sorted(SECRETS)]
    assert log.read_text().splitlines()[:3] == shown
    copy = next(path for path in files if path.name == "config.yaml")
    assert copy.read_text() == '# ours\nname: demo\nnote: "[redacted]"\napi_key: "[redacted]"\n'


def test_documents_hold_none(tmp_path: Path) -> None:
    """Files that are replaced whole: run.json, manifests, progress."""
    text = encode_document({"command": [f"--note={value}" for value in SECRETS.values()]}).decode()
    assert not [value for value in SECRETS.values() if value in text]
    assert text.count("[redacted]") == len(SECRETS)
