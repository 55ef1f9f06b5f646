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

from helpers import preloaded

ROLLBOOK = str(Path(sys.executable).parent / "rollbook")


NO_TENSORS = b"\x08\x00\x00\x00\x00\x00\x00\x00{}      "  # a file of weights without any


class Shell:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.environment = preloaded.installed_environment()

    def __call__(self, *words: str, code: int | None = 0) -> str:
        result = preloaded.run("rollbook", *words, cwd=self.directory, env=self.environment)
        if code is not None:
            assert result.returncode == code, (
                f"{words}: {result.returncode}\n{result.stdout}\n{result.stderr}"
            )
        return result.stdout + result.stderr

    def json(self, *words: str, code: int | None = 0) -> object:
        words = _with_json(*words)
        result = preloaded.run("rollbook", *words, cwd=self.directory, env=self.environment)
        if code is not None:
            assert result.returncode == code, result.stderr
        return json.loads(result.stdout)


def _with_json(*words: str) -> tuple[str, ...]:
    place = words.index("--") if "--" in words else len(words)
    return *words[:place], "--json", *words[place:]


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
    assert "bad: failed" in said and "ValueError: no such thing" in said and "rollbook logs -n 50 2" in said
    assert shell.json("status", code=4)["exit_code"] == 7
    assert [row["status"] for row in shell.json("history")] == ["failed", "completed"]
    assert [row["name"] for row in shell.json("history", "--state", "completed")] == ["good"]
    assert "hello" in shell("logs", "good")
    assert shell("logs", "-n", "1", "bad").strip() == "ValueError: no such thing"


def test_why_it_failed(shell: Shell) -> None:
    shell("run", "a", "--", "bash", "-c", "echo 'ValueError: bad lr' >&2; echo cleanup done; exit 1", code=1)
    assert "why:        ValueError: bad lr" in shell("status", code=4)
    shell("run", "b", "--", sys.executable, "-c", "{}['key']", code=1)
    assert "why:        KeyError: 'key'" in shell("status", code=4)
    assert "b failed: exit code 7" in shell("run", "b", "--", "bash", "-c", "exit 7", code=7)


def test_a_renamed_history_finds_its_logs(shell: Shell) -> None:
    shell("run", "a", "--", "echo", "hello")
    (shell.directory / "artifacts").rename(shell.directory / "renamed")
    assert "hello" in shell("logs", "a", "--artifacts", "renamed")


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
    helpers = str(Path(__file__).parents[1])
    loop = (
        f"import sys; sys.path.append({helpers!r}); from pathlib import Path; "
        "from helpers.sample_run import SampleConfig, write_sample_run; "
        "write_sample_run(Path('out'), config=SampleConfig(iterations=5))"
    )
    shell("run", "demo", "--", sys.executable, "-c", loop)
    report = shell.json("status")
    status = report["progress"]
    assert (status["step"], status["total_steps"], status["percent"]) == (5, 5, 100.0)
    assert status["headline"] == "env/all/reward/total"
    assert status["checkpoint"]["complete"] is True
    assert report["checkpoint"]["step"] == 5
    drawn = shell.json("plot", "demo")
    assert (shell.directory / drawn["picture"]).read_bytes().startswith(b"\x89PNG")
    assert "kl_sample_train_v2" in drawn["curves"]
    assert "it has:" in shell("plot", "out", "-m", "nothing", code=2)


def test_a_trainers_directory(shell: Shell, peer_fixtures: Path) -> None:
    shell("run", "sft", "--output-dir", str(peer_fixtures / "llamafactory_sft"), "--", "true")
    status = shell.json("status")["progress"]
    assert status["source"] == "trainer_log.jsonl"
    assert (status["step"], status["total_steps"]) == (12, 12)
    assert status["headline"] == "loss" and status["value"] > 0
    crashed = peer_fixtures / "llamafactory_crashed"
    drawn = shell.json("plot", str(crashed), "-o", "crashed.png")
    assert drawn["curves"]["loss"] > 0


def make_checkpoint(directory: Path, step: int, *, complete: bool = True) -> None:
    path = directory / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(NO_TENSORS)
    if complete:
        (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))


def trainer(output: Path) -> list[str]:
    """A command that leaves what a trainer leaves: two whole checkpoints, and one that it did not finish."""
    code = f"""
import json, pathlib
output = pathlib.Path({str(output)!r})
history = []
for step, loss in ((10, 0.75), (20, 0.25), (30, 0.125)):
    path = output / f"checkpoint-{{step}}"
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes({NO_TENSORS!r})
    if step < 30:
        history.append({{"step": step, "loss": loss}})
        (path / "trainer_state.json").write_text(json.dumps({{"global_step": step, "log_history": history}}))
(output / "trainer_state.json").write_text(json.dumps({{"global_step": 20, "log_history": history}}))
(output / "train_results.json").write_text('{{"train_loss": 0.5, "train_runtime": 12.5}}')
"""
    return [sys.executable, "-c", code]


def test_what_an_earlier_run_left_is_not_this_ones_result(shell: Shell) -> None:
    config = shell.directory / "config.yaml"
    config.write_text("runtime_info: {}\n")
    make_checkpoint(shell.directory / "out", 10)
    for path in (shell.directory / "out").rglob("*"):
        os.utime(path, (1e9, 1e9))
    said = shell("run", "stale", "--output-dir", "out", "--config", "config.yaml", "--", "true")
    assert "nothing to publish: no complete checkpoint of this run" in said
    assert config.read_text() == "runtime_info: {}\n"
    assert "checkpoint" not in shell.json("history")[0]


def test_a_handoff_that_is_refused_says_so(shell: Shell) -> None:
    config = shell.directory / "config.yaml"
    config.write_text("runtime_info: {}\nruntime_info: {}\n")
    output = shell.directory / "out"
    said = shell("run", "dup", "--output-dir", str(output), "--config", "config.yaml", "--", *trainer(output))
    assert "was left alone" in said
    assert "no such file" in shell("run", "x", "--config", "nope.yaml", "--", "true", code=2)


def test_a_running_run_is_what_status_shows(shell: Shell) -> None:
    shell("run", "long", "--detach", "--grace", "1", "--", "sleep", "300")
    shell("run", "quick", "--", "true")
    assert "long: running" in shell("status", code=3)
    assert "quick: completed" in shell("status", "quick")
    assert shell.json("stop")["name"] == "long"
    assert "quick: completed" in shell("status")


def test_two_running_runs_of_one_name(shell: Shell) -> None:
    ids = [
        shell.json("run", "twin", "--detach", "--grace", "1", "--", "sleep", "300")["id"] for _ in range(2)
    ]
    said = shell("stop", "twin", code=2)
    assert all(run_id in said for run_id in ids)
    shell("stop", ids[0])
    assert shell.json("stop", "twin")["id"] == ids[1]


def test_a_diverged_loss_is_shouted(shell: Shell) -> None:
    output = shell.directory / "out"
    output.mkdir()
    rows = [
        f'{{"current_steps": {i}, "total_steps": 9, "loss": {"NaN" if i > 6 else 1.5}}}' for i in range(9)
    ]
    (output / "trainer_log.jsonl").write_text("\n".join(rows) + "\n")
    (output / "checkpoint-5").mkdir()
    (output / "checkpoint-5/trainer_state.json").write_text("[]")
    shell("run", "sft", "--output-dir", "out", "--", "true")
    said = shell("status")
    assert "NOT FINITE: loss" in said and "step:       8 of 9" in said and "NOT complete" in said


def test_a_trl_directory(shell: Shell, peer_fixtures: Path) -> None:
    shell("run", "trl", "--output-dir", str(peer_fixtures / "trl_sft"), "--", "true")
    status = shell.json("status")["progress"]
    assert status["source"] == "trainer_state.json" and status["step"] == 4
    assert shell.json("plot", "trl", "-o", "trl.png")["curves"]["loss"] > 0
    assert "no picture could be written" in shell("plot", "trl", "-o", "trl.nonsense", code=2)


def test_a_loop_of_its_own_enters_the_history(shell: Shell) -> None:
    code = "import rollbook\nwith rollbook.Run('out', history='artifacts') as run: run.alert('here')"
    subprocess.run([sys.executable, "-c", code], cwd=shell.directory, check=True)
    dies = "import os, rollbook\nrun = rollbook.Run('two', history='artifacts')\nos.kill(os.getpid(), 9)\n"
    subprocess.run([sys.executable, "-c", dies], cwd=shell.directory, check=False)
    assert [(row["name"], row["status"]) for row in shell.json("history")] == [
        ("two", "lost"),
        ("out", "completed"),
    ]


@pytest.mark.parametrize("name", ["", "latest", "a@5"])
def test_names_that_cannot_be_asked_for_are_refused(shell: Shell, name: str) -> None:
    assert "cannot name a run" in shell("run", name, "--", "true", code=2)


def test_options_before_a_subcommand_count(shell: Shell) -> None:
    shell("run", "--artifacts", "elsewhere", "one", "--", "true")
    assert "one" in shell("history", "--artifacts", "elsewhere", "show", "one")
    assert "no such directory" in shell("status", "--artifacts", "typo", code=2)
    assert "is not one of" in shell("history", "--artifacts", "elsewhere", "--state", "runing", code=2)


def test_handoff_and_promote(shell: Shell) -> None:
    config = shell.directory / "config.yaml"
    config.write_text("runtime_info:  # ours\n  input: {lr: 1e-5}\n  output:   # written by the run\n")
    output = shell.directory / "artifacts/model/demo"
    said = shell(
        "run", "demo", "--output-dir", str(output), "--config", "config.yaml", "--", *trainer(output)
    )
    assert (
        "handoff: written: checkpoint of step 20; checkpoint-30 is not complete and was passed over" in said
    )
    text = config.read_text()
    assert "final_loss: 0.5" in text and "last_loss: 0.25" in text
    assert "train_loss_plot: artifacts/model/demo/training_loss.png" in text
    assert (output / "training_loss.png").read_bytes().startswith(b"\x89PNG")
    assert "checkpoint_path: artifacts/model/demo/checkpoint-20" in text
    assert text.startswith("runtime_info:  # ours\n  input: {lr: 1e-5}\n  output:   # written by the run\n")
    assert "handoff:    written" in shell("status", "demo")
    shell("promote", "demo@10")
    text = config.read_text()
    assert "checkpoint_path: artifacts/model/demo/checkpoint-10" in text
    assert "last_loss: 0.75" in text and "final_loss: 0.5" not in text
    assert "not complete" in shell("promote", "demo@30", code=2)
    assert "complete ones: 10, 20" in shell("promote", "demo@99", code=2)


def test_what_ends_with_a_loss_that_is_no_number_is_not_handed_over(shell: Shell) -> None:
    """Whoever wants it all the same says so with `promote`."""
    config = shell.directory / "config.yaml"
    config.write_text("runtime_info: {}\n")
    python, flag, code = trainer(shell.directory / "out")
    code = code.replace("(20, 0.25)", "(20, float('nan'))")
    words = ["--output-dir", "out", "--config", "config.yaml", "--", python, flag, code]
    said = shell("run", "burst", *words)
    assert "handoff: nothing published: the run has diverged: the last optimiser step was not finite" in said
    assert "To publish it all the same: rollbook promote burst" in said
    assert config.read_text() == "runtime_info: {}\n"
    shell("promote", "burst")
    assert "checkpoint-20" in config.read_text()


def test_promote_reads_every_byte_and_status_every_size(shell: Shell) -> None:
    (shell.directory / "config.yaml").write_text("runtime_info: {}\n")
    code = """
import rollbook
with rollbook.Run('out') as run:
    for i in (1, 2):
        with run.checkpoint(f'{i:06d}', batch=i) as directory:
            (directory / 'weights').write_text('weights')
"""
    shell("run", "loop", "--config", "config.yaml", "--", sys.executable, "-c", code)
    weights = shell.directory / "out/checkpoints/000002/weights"
    weights.write_text("Weights")
    assert "weights was changed: its digest" in shell("promote", "loop@2", code=2)
    said = shell("promote", "loop")
    assert "checkpoints/000002 is passed over: " in said and "000001 (step 1)" in said
    assert "out/checkpoints/000001" in (shell.directory / "config.yaml").read_text()
    weights.write_text("w")
    checkpoint = shell.json("status")["progress"]["checkpoint"]
    assert not checkpoint["complete"] and "weights has 1 bytes instead of 7" in checkpoint["problem"]


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
    output = shell.directory / "out"
    python, flag, code = trainer(output)
    failing = [python, flag, f"{code}\nraise SystemExit(1)"]
    shell("run", "demo", "--output-dir", "out", "--config", "config.yaml", "--", *failing, code=1)
    assert config.read_text() == "runtime_info: {}\n"
    assert shell.json("history")[0]["checkpoint"]["step"] == 20
    shell("promote", "demo@10")
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
