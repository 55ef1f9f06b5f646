"""TRL's SFTTrainer, GRPOTrainer and its own SFT script really run, in `.venvs/trl`, and are recorded.

What the log must hold is taken from the trainer state that TRL itself leaves in its checkpoints.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from interop.setup_trl import TRL
from rollbook.cli.main import main
from rollbook.runs.jobs.ledger import Ledger, RunRecord
from rollbook.runs.status import read_status

pytestmark = pytest.mark.interop
SCRIPT = Path(__file__).with_name("record_with_trl.py")


def run_with_trl(directory: Path, *arguments: str | Path) -> None:
    if not TRL.is_ready():
        pytest.fail(".venvs/trl is missing or out of date; run `make test-interop`", pytrace=False)
    environment = {**os.environ, "ROLLBOOK_ARTIFACTS": str(directory / "artifacts"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [TRL.python, *arguments],
        cwd=directory,
        env=environment | {"TRL_EXPERIMENTAL_SILENCE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[rollbook]" not in done.stderr, done.stderr


def lines_of(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "trainer_log.jsonl").open()]


def assert_log_is_what_trl_reported(output: Path) -> None:
    state = json.loads((output / "checkpoint-4/trainer_state.json").read_text())
    reported = [row for row in state["log_history"] if "loss" in row]
    recorded = [line for line in lines_of(output) if "loss" in line]
    assert (
        [row.pop("step") for row in reported] == [line["current_steps"] for line in recorded] == [1, 2, 3, 4]
    )
    for row, line in zip(reported, recorded, strict=True):
        row["lr"] = row.pop("learning_rate")
        assert {name: line[name] for name in row} == row
        assert line["total_tokens"] == row["num_tokens"]


def recorded_run(directory: Path, kind: str) -> RunRecord:
    record = Ledger(directory / "artifacts").records()[-1]
    assert (record.status, record.kind) == ("completed", kind)
    assert record.checkpoint is not None and record.checkpoint["step"] == 4
    return record


def test_sft_and_its_resume(tmp_path: Path) -> None:
    run_with_trl(tmp_path, SCRIPT, "sft", tmp_path)
    output = tmp_path / "sft"
    assert_log_is_what_trl_reported(output)
    whole = lines_of(output)
    assert {"entropy", "mean_token_accuracy", "grad_norm"} <= whole[0].keys()
    assert [line["current_steps"] for line in whole if "eval_loss" in line] == [4]
    assert recorded_run(tmp_path, "sft").output_dir == "sft"

    run_with_trl(tmp_path, SCRIPT, "sft", tmp_path, output / "checkpoint-2")
    again = lines_of(output)
    assert again[:2] == whole[:2]
    for name in ("current_steps", "loss", "total_tokens"):  # TRL's own count begins again; ours goes on
        assert [line.get(name) for line in again] == pytest.approx([line.get(name) for line in whole])
    assert recorded_run(tmp_path, "sft").resumed_from == "checkpoint-2"


def test_grpo_by_report_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_with_trl(tmp_path, SCRIPT, "grpo", tmp_path)
    output = tmp_path / "grpo"
    assert_log_is_what_trl_reported(output)
    line = lines_of(output)[0]
    assert {"reward", "reward_std", "kl", "entropy", "completions/mean_length"} <= line.keys()
    record = recorded_run(tmp_path, "grpo")
    assert record.metrics is not None and record.metrics["last_reward"] == lines_of(output)[3]["reward"]
    status = read_status(output)
    assert (status.step, status.total_steps, status.percent) == (4, 4, 100.0)
    with pytest.raises(SystemExit):
        main(["plot", str(output), "-m", "reward", "-m", "kl", "--json"])
    assert json.loads(capsys.readouterr().out)["curves"] == {"reward": 4, "kl": 4}


def test_trls_own_script_by_its_config_alone(tmp_path: Path) -> None:
    run_with_trl(tmp_path, SCRIPT, "prepare", tmp_path)
    settings = {
        "model_name_or_path": str(tmp_path / "model"),
        "dataset_name": str(tmp_path / "data"),
        "output_dir": "scripted",
        "report_to": "rollbook",
        "max_steps": 4,
        "logging_steps": 1,
        "save_steps": 2,
        "use_cpu": True,
        "bf16": False,
        "max_length": 64,
    }
    (tmp_path / "sft.yaml").write_text(json.dumps(settings))
    run_with_trl(tmp_path, "-m", "rollbook.recorder", "-m", "trl.scripts.sft", "--config", "sft.yaml")
    assert_log_is_what_trl_reported(tmp_path / "scripted")
    assert recorded_run(tmp_path, "sft").name == "scripted"
