"""The commands about runs, typed as a person would."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROLLBOOK = str(Path(sys.executable).parent / "rollbook")


class Shell:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": path}

    def __call__(self, *words: str, code: int | None = 0) -> str:
        result = subprocess.run(
            [ROLLBOOK, *words],
            cwd=self.directory,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        if code is not None:
            assert result.returncode == code, (
                f"{words}: {result.returncode}\n{result.stdout}\n{result.stderr}"
            )
        return result.stdout + result.stderr

    def json(self, *words: str, code: int | None = 0) -> object:
        result = subprocess.run(
            [ROLLBOOK, *_with_json(list(words))],
            cwd=self.directory,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        if code is not None:
            assert result.returncode == code, result.stderr
        return json.loads(result.stdout)


def _with_json(words: list[str]) -> list[str]:
    place = words.index("--") if "--" in words else len(words)
    return [*words[:place], "--json", *words[place:]]


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def test_idle_completed_failed(shell: Shell) -> None:
    assert "no run yet" in shell("status")
    assert shell.json("status") == {"status": "idle"}
    shell("run", "good", "--", "echo", "hello")
    assert "good: completed" in shell("status")
    shell("run", "bad", "--", "bash", "-c", "echo 'ValueError: no such thing' >&2; exit 7", code=7)
    said = shell("status", code=4)
    assert "bad: failed" in said and "ValueError: no such thing" in said and "rollbook logs -n 50 bad" in said
    assert shell.json("status", code=4)["exit_code"] == 7
    assert [row["status"] for row in shell.json("history")] == ["failed", "completed"]
    assert [row["name"] for row in shell.json("history", "--state", "completed")] == ["good"]
    assert "hello" in shell("logs", "good")
    assert shell("logs", "-n", "1", "bad").strip() == "ValueError: no such thing"


def test_notes_and_show(shell: Shell) -> None:
    shell("run", "a", "--", "true")
    shell("history", "note", "a", "the one with the new data")
    assert "the one with the new data" in shell("history")
    assert shell.json("history", "show", "a")["notes"][0]["text"] == "the one with the new data"


def test_detach_follow_stop(shell: Shell) -> None:
    started = shell.json("run", "long", "--detach", "--grace", "2", "--", "bash", "-c", "echo up; sleep 300")
    assert started["status"] == "running"
    deadline = time.monotonic() + 20
    while "up" not in shell("logs", "long") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert "long: running" in shell("status", code=3)
    follower = subprocess.Popen(
        [ROLLBOOK, "logs", "-f", "long"], cwd=shell.directory, stdout=subprocess.PIPE, text=True
    )
    assert shell.json("stop", "long")["status"] == "interrupted"
    assert "up" in follower.communicate(timeout=30)[0]
    assert "long: interrupted" in shell("status")
    assert "is not running" in shell("stop", "long", code=2)


def test_status_after_kill_9(shell: Shell) -> None:
    started = shell.json("run", "doomed", "--detach", "--grace", "1", "--", "sleep", "300")
    os.kill(started["pid"], signal.SIGKILL)
    time.sleep(0.2)
    said = shell("status", code=4)
    assert "doomed: lost" in said and "why:" in said


def test_status_of_a_recorded_run_and_its_plot(shell: Shell) -> None:
    shell("run", "demo", "--", ROLLBOOK, "demo", "out", "--iterations", "5")
    report = shell.json("status")
    standing = report["standing"]
    assert (standing["step"], standing["total_steps"], standing["percent"]) == (5, 5, 100.0)
    assert standing["headline"] == "env/all/reward/total"
    assert standing["checkpoint"]["complete"] is True
    assert report["checkpoint"]["step"] == 5
    drawn = shell.json("plot", "demo")
    assert (shell.directory / drawn["picture"]).read_bytes().startswith(b"\x89PNG")
    assert "kl_sample_train_v2" in drawn["curves"]
    assert "it has:" in shell("plot", "out", "-m", "nothing", code=2)


def test_a_trainers_directory(shell: Shell, peer_fixtures: Path) -> None:
    shell("run", "sft", "--output-dir", str(peer_fixtures / "llamafactory_sft"), "--", "true")
    standing = shell.json("status")["standing"]
    assert standing["source"] == "trainer_log.jsonl"
    assert (standing["step"], standing["total_steps"]) == (12, 12)
    assert standing["headline"] == "loss" and standing["value"] > 0
    crashed = peer_fixtures / "llamafactory_crashed"
    drawn = shell.json("plot", str(crashed), "-o", "crashed.png")
    assert drawn["curves"]["loss"] > 0


def make_checkpoint(directory: Path, step: int, *, complete: bool = True) -> None:
    path = directory / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(b"weights")
    if complete:
        (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))


def test_handoff_and_promote(shell: Shell) -> None:
    config = shell.directory / "config.yaml"
    config.write_text("runtime_info:  # ours\n  input: {lr: 1e-5}\n  output:   # written by the run\n")
    output = shell.directory / "artifacts/model/demo"
    make_checkpoint(output, 10)
    make_checkpoint(output, 20)
    make_checkpoint(output, 30, complete=False)
    (output / "train_results.json").write_text('{"train_loss": 0.5, "train_runtime": 12.5}')
    shell("run", "demo", "--output-dir", str(output), "--config", "config.yaml", "--", "true")
    text = config.read_text()
    assert "checkpoint_path: artifacts/model/demo/checkpoint-20" in text
    assert text.startswith("runtime_info:  # ours\n  input: {lr: 1e-5}\n  output:   # written by the run\n")
    shell("promote", "demo@10")
    assert "checkpoint_path: artifacts/model/demo/checkpoint-10" in config.read_text()
    assert "not complete" in shell("promote", "demo@30", code=2)
    assert "complete ones: 10, 20" in shell("promote", "demo@99", code=2)


def test_the_trackers_id_is_handed_over(shell: Shell) -> None:
    (shell.directory / "config.yaml").write_text("runtime_info: {}\n")
    code = """
import rollbook
with rollbook.Run('out', trackers='tensorboard') as run:
    with run.checkpoint('000001', batch=1) as directory:
        (directory / 'w').touch()
"""
    shell("run", "tracked", "--config", "config.yaml", "--", sys.executable, "-c", code)
    run_id = json.loads((shell.directory / "out/run.json").read_text())["id"]
    assert f'training_curves: "{run_id}"' in (shell.directory / "config.yaml").read_text()


def test_a_failed_run_hands_over_nothing(shell: Shell) -> None:
    config = shell.directory / "config.yaml"
    config.write_text("runtime_info: {}\n")
    make_checkpoint(shell.directory / "out", 10)
    shell("run", "demo", "--output-dir", "out", "--config", "config.yaml", "--", "false", code=1)
    assert config.read_text() == "runtime_info: {}\n"
    assert shell.json("history")[0]["checkpoint"]["step"] == 10
    shell("promote", "demo")
    assert "checkpoint-10" in config.read_text()


def test_diff(shell: Shell) -> None:
    for name, lr in (("a", 0.1), ("b", 0.2)):
        code = (
            "import rollbook\n"
            f"with rollbook.Run('{name}', config={{'lr': {lr}, 'seed': 1}}) as run:\n"
            f"    run.log_metrics({{'loss': {lr}}}, 0)\n"
        )
        shell("run", name, "--", sys.executable, "-c", code)
    changes = shell.json("diff", "a", "b")
    assert changes["config"] == [{"key": "lr", "a": 0.1, "b": 0.2}]
    assert changes["metrics"]["loss"] == [0.1, 0.2]
    assert "lr: 0.1 -> 0.2" in shell("diff", "a", "b")


def test_unknown_runs_are_refused_with_the_nearest(shell: Shell) -> None:
    shell("run", "baseline", "--", "true")
    assert "baseline" in shell("status", "basline", code=2)
