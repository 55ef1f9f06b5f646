"""The recorder on real Trainer runs: a whole one, a resumed one, one that diverges, crashes, is killed."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rollbook.recorder
from helpers.trainer import TrainingProcess
from recorded import alerts, log_lines, only_record, python
from rollbook.cli.main import main
from rollbook.recorder import Recorder
from rollbook.runs.jobs.ledger import Ledger
from tiny_model import LLAMA, VOCABULARY

# A script as a user has it; what breaks it is filled in by the tests.
SCRIPT = """
import os, sys, time, signal
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

class Breakdown(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        {breakdown}

torch.manual_seed(0)
config = AutoConfig.for_model(**{config})
rows = [{{"input_ids": [i % 50] * 8, "labels": [i % 50] * 8}} for i in range(64)]
args = TrainingArguments(
    "out", max_steps=6, logging_steps=1, save_steps=2, per_device_train_batch_size=2, use_cpu=True,
    disable_tqdm=True, {arguments}
)
Trainer(AutoModelForCausalLM.from_config(config), args, train_dataset=rows, callbacks=[Breakdown()]).train()
"""
CONFIG = {**LLAMA, "vocab_size": VOCABULARY}


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    for name in ("ROLLBOOK_RUN_DIR", "ROLLBOOK_ARTIFACTS"):
        monkeypatch.delenv(name, raising=False)
    yield
    rollbook.recorder._open.clear()  # a test that leaves a run open leaves none for the end of pytest


def train(
    callbacks: tuple[Any, ...] = (), *, resume: str | None = None, kind: Any = None, **arguments: Any
) -> Any:
    """A real Trainer on a tiny model, with evaluation and checkpoints in ./out."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "max_steps": 6,
        "logging_steps": 1,
        "save_steps": 2,
        "per_device_train_batch_size": 2,
        "include_num_input_tokens_seen": "all",
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": "none",
    }
    rows = [{"input_ids": [i % 50] * 8, "labels": [i % 50] * 8} for i in range(64)]
    trainer = (kind or Trainer)(
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG)),
        TrainingArguments("out", **settings | arguments),
        train_dataset=rows,
        eval_dataset=rows[:4],
        callbacks=list(callbacks),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def write_script(breakdown: str = "pass", arguments: str = "report_to='rollbook'") -> Path:
    path = Path("train.py")
    path.write_text(SCRIPT.format(config=CONFIG, breakdown=breakdown, arguments=arguments))
    return path


def test_importing_it_loads_nothing_but_the_standard_library() -> None:
    """The rest is imported when training begins, in the process that records."""
    code = """
        import sys
        before = set(sys.modules)
        import rollbook.recorder
        print(*sorted(set(sys.modules) - before))
    """
    loaded = python("-c", textwrap.dedent(code)).stdout.split()
    foreign = [name for name in loaded if name.partition(".")[0] not in sys.stdlib_module_names]
    assert foreign == ["rollbook", "rollbook.recorder", "rollbook.version"]


def test_a_run_is_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = train((Recorder(),), eval_strategy="steps", eval_steps=3)
    trainer.evaluate()
    lines = log_lines()
    points = [line for line in lines if "loss" in line]
    history = [row for row in trainer.state.log_history if "loss" in row]
    assert [line["current_steps"] for line in points] == [1, 2, 3, 4, 5, 6]
    for line, row in zip(points, history, strict=True):
        assert line["total_steps"] == 6
        assert line["percentage"] == round(100 * line["current_steps"] / 6, 2)
        assert (line["loss"], line["lr"], line["grad_norm"], line["epoch"]) == (
            row["loss"],
            row["learning_rate"],
            row["grad_norm"],
            row["epoch"],
        )
        assert line["total_tokens"] == 16 * line["current_steps"]
        assert {"elapsed_time", "remaining_time", "throughput"} <= line.keys()
    # Two evaluations during training, and the one after it, which LLaMA-Factory's log leaves out.
    assert [line["current_steps"] for line in lines if "eval_loss" in line] == [3, 6, 6]
    assert all("nonfinite" not in line for line in lines) and alerts() == []

    record = only_record()
    assert (record.status, record.name, record.kind) == ("completed", "out", "train")
    assert (record.output_dir, record.pid) == ("out", os.getpid())
    assert record.checkpoint == {"path": str(Path("out/checkpoint-6").absolute()), "step": 6}
    assert record.metrics is not None
    assert record.metrics["steps"] == 6
    assert record.metrics["last_loss"] == points[-1]["loss"]
    assert record.metrics["final_loss"] == pytest.approx(sum(line["loss"] for line in points) / 6)

    report = command(capsys, "status", "--json")
    assert (report["status"], report["progress"]["step"], report["progress"]["percent"]) == (
        "completed",
        6,
        100.0,
    )
    assert report["progress"]["value"] == points[-1]["loss"]
    assert [run["id"] for run in command(capsys, "history", "--json")] == [record.id]
    assert command(capsys, "plot", "--json")["curves"] == {"loss": 6, "eval_loss": 2}
    assert Path("out/training_loss.png").stat().st_size > 0


def command(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_:
        main(list(arguments))
        raise SystemExit(0)
    output = capsys.readouterr().out
    assert (exit_.value.code or 0) == code, output
    return json.loads(output)


def test_a_resumed_run_reads_as_one() -> None:
    from transformers import TrainerCallback

    class Crash(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 5:
                raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError):
        train((Recorder(), Crash()))
    assert [line["current_steps"] for line in log_lines()] == [1, 2, 3, 4, 5]
    before = log_lines()[:4]
    with Path("out/trainer_log.jsonl").open("a") as log:
        log.write('{"current_steps": 6, "lo')  # a kill tears the last line
    train((Recorder(),), resume="out/checkpoint-4")
    lines = log_lines()
    assert lines[:4] == before
    points = [line for line in lines if "loss" in line]
    assert [line["current_steps"] for line in points] == [1, 2, 3, 4, 5, 6]
    assert [line["total_tokens"] for line in points] == [16 * step for step in range(1, 7)]
    assert [line["elapsed_s"] for line in points] == sorted(line["elapsed_s"] for line in points)
    for line in points:  # all tokens over the time of all sessions
        rounded = 0.001 * line["throughput"]  # elapsed_s has three digits
        assert line["throughput"] * line["elapsed_s"] == pytest.approx(line["total_tokens"], abs=rounded)
    first, second = Ledger("artifacts").records()
    assert (first.status, first.reason) == ("failed", "training began again before it had ended")
    assert (second.status, second.resumed_from) == ("completed", "checkpoint-4")
    assert first.checkpoint is not None and first.checkpoint["step"] == 4


@pytest.mark.parametrize("logging_steps", [1, 2])
def test_a_loss_that_is_not_finite_is_shouted(capsys: pytest.CaptureFixture[str], logging_steps: int) -> None:
    from transformers import Trainer

    class Diverging(Trainer):
        def compute_loss(self, *arguments: Any, **options: Any) -> Any:
            loss = super().compute_loss(*arguments, **options)
            return loss * math.nan if self.state.global_step >= 3 and self.model.training else loss

    train((Recorder(),), kind=Diverging, logging_steps=logging_steps)
    points = [line for line in log_lines() if "loss" in line]
    assert all(line["loss"] is None or line["loss"] > 1 for line in points)  # neither 0.0 nor made up
    bad = [line["current_steps"] for line in points if line["loss"] is None]
    assert bad == [step for step in (4, 5, 6) if step % logging_steps == 0]
    assert all(line["nonfinite"] == ["loss", "grad_norm"] for line in points if line["loss"] is None)
    first, *more = alerts()
    assert (first.level, first.title, first.step) == ("error", "loss, grad_norm not finite", 4)
    assert [alert.title for alert in more] == ["train_loss not finite"]  # once, not at every step
    assert "[rollbook] step 4 of 6: loss, grad_norm not finite" in capsys.readouterr().err
    report = command(capsys, "status", "--json")
    assert report["progress"]["nonfinite"] == ["loss", "grad_norm"]


def test_a_killed_run_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    write_script(breakdown="time.sleep(300 if state.global_step == 4 else 0)")
    with TrainingProcess("rollbook.recorder", "train.py") as trainer:
        log = Path("out/trainer_log.jsonl")
        deadline = time.monotonic() + 200
        while not log.exists() or log.read_bytes().count(b"\n") < 3:
            assert trainer.is_alive() and time.monotonic() < deadline, trainer.output
            time.sleep(0.05)
        report = command(capsys, "status", "--json", code=3)
        assert (report["status"], report["pid"]) == ("running", trainer.pid)
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
    report = command(capsys, "status", "--json", code=4)
    assert report["status"] == "lost"
    assert (report["progress"]["step"], report["progress"]["checkpoint"]["step"]) == (3, 2)
    assert command(capsys, "plot", "--json")["curves"] == {"loss": 3}


def test_a_script_that_is_left_alone_and_crashes() -> None:
    script = write_script(breakdown="if state.global_step == 4: raise ValueError('token=hf_' + 'a' * 34)")
    with TrainingProcess("rollbook.recorder", script) as trainer:
        assert trainer.wait() == 1
        assert "ValueError: token=hf_" in trainer.output  # the traceback is still shown
    record = only_record()
    assert (
        record.status == "failed" and record.reason is not None and record.reason.startswith("ValueError: ")
    )
    assert record.checkpoint is not None and record.checkpoint["step"] == 2
    [alert] = alerts()
    assert (alert.level, alert.title, alert.step) == ("error", "training failed", 4)
    assert "hf_aaaa" not in Path("artifacts/index.yaml").read_text() + Path("out/alerts.jsonl").read_text()


def test_under_a_supervisor_it_is_recorded_once() -> None:
    script = write_script()
    rollbook_run = ["-c", "from rollbook.cli.main import main; main()", "run", "demo", "--"]
    done = python(*rollbook_run, sys.executable, "-m", "rollbook.recorder", script)
    assert done.returncode == 0, done.stdout + done.stderr
    record = only_record()
    assert (record.name, record.status) == ("demo", "completed")
    assert record.output_dir == "out"
    assert record.metrics is not None and record.metrics["steps"] == 6
    assert record.checkpoint is not None and record.checkpoint["step"] == 6


def test_given_twice_it_records_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations import integration_utils

    monkeypatch.setattr(
        integration_utils, "INTEGRATION_TO_CALLBACK", dict(integration_utils.INTEGRATION_TO_CALLBACK)
    )
    rollbook.recorder.register()
    train((Recorder(),), report_to="rollbook", save_strategy="no")
    assert [line["current_steps"] for line in log_lines() if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert only_record().checkpoint is None


class FullDisk:
    """From step 2 on no file can grow; when training ends there is room again."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_"):
            return lambda *_, **__: None
        raise AttributeError(name)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@pytest.mark.parametrize("trouble", ["full disk", "no such directory", "no history"])
def test_training_never_fails_because_recording_does(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, trouble: str
) -> None:
    callbacks: tuple[Any, ...] = (Recorder(),)
    if trouble == "full disk":
        callbacks = (FullDisk(), Recorder())
    elif trouble == "no such directory":
        Path("out").mkdir()
        Path("out/trainer_log.jsonl").symlink_to("unmounted/trainer_log.jsonl")
    else:
        Path("artifacts").write_text("a file")
    trainer = train(callbacks, save_strategy="no")
    assert trainer.state.global_step == 6
    warnings = capsys.readouterr().err.count("[rollbook] this run is not fully recorded")
    warnings += caplog.text.count("the history was not written")
    assert warnings == 1
    if trouble == "no history":
        assert len(log_lines()) == 7
    elif trouble == "full disk":
        assert [line["current_steps"] for line in log_lines()] == [1, 2]
