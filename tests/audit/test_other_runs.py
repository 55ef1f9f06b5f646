"""The audit of other runs: recorded with `rollbook.Run`, Tinker's folders, fine-tunings, other trainers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import rollbook
from helpers.sample_run import SampleConfig, write_sample_run
from helpers.tampered import balanced, copy_of, drop_line, edit_row, found
from rollbook.audit.result import Kind
from rollbook.records.layout import Layout
from rollbook.sft.settings import load_settings
from rollbook.sft.train import train
from tiny_model import sums, write_config


def test_a_loop_of_ones_own_balances(sample_run: Path, tmp_path: Path) -> None:
    """Several turns, tags, a failure and a NaN; no fates and no tokens."""
    audit = balanced(sample_run)
    assert {(place.split, place.name) for place in audit.places} == {
        ("train", "recorded"),
        ("train", "failed"),
        ("eval", "evaluated"),
    }
    write_sample_run(tmp_path / "nested", config=SampleConfig(iterations=4), layout=Layout.NESTED)
    balanced(tmp_path / "nested")


def test_every_edit_of_a_counted_metric_is_found(sample_run: Path, tmp_path: Path) -> None:
    for key in ("env/all/rollouts/ok", "env/all/correct", "env/mental/reward/std", "test/env/all/stop/stop",
                "env/all/by_group/frac_mixed", "ac_tokens_per_turn", "env/all/total_ob_tokens"):  # fmt: skip
        run = copy_of(sample_run, tmp_path / key.replace("/", "_"))
        edit_row(run / "metrics.jsonl", 1, lambda row, key=key: row.update({key: row[key] + 0.5}))
        found(rollbook.audit(run), Kind.DIFFERS, "metrics.jsonl", line=1, key=key)


def test_rollouts_that_never_came_are_missing_by_the_runs_own_word(tmp_path: Path) -> None:
    write_short_groups(tmp_path / "run")
    audit = rollbook.audit(tmp_path / "run")
    assert "1 of 6" in found(audit, Kind.MISSING, "metrics.jsonl", key="env/all/rollouts/missing").what
    assert (audit.verdict, audit.exit_code) == ("incomplete", 3)
    assert {place.name: place.rollouts for place in audit.places} == {"recorded": 5, "missing": 1}


def write_short_groups(path: Path) -> None:
    with rollbook.Run(path, total_iterations=1) as run:
        with run.rollouts(iteration=0) as log:
            for index, size in enumerate((3, 2)):
                with log.group(index, task_id=f"t{index}", size=3) as group:
                    for _ in range(size):
                        group.add(rollbook.Trajectory.single_turn("a", "b", 1.0, ac_len=3))
        run.log_metrics(log.metrics(), step=0)


def test_a_run_that_is_written_is_running(tmp_path: Path) -> None:
    with rollbook.Run(tmp_path / "run", total_iterations=2) as run:
        for i in range(2):
            with run.rollouts(iteration=i) as log, log.group(0, task_id="t", size=1) as group:
                group.add(rollbook.Trajectory.single_turn("a", "b", 1.0, ac_len=3))
                run.sync()
                audit = rollbook.audit(tmp_path / "run")
                assert (audit.verdict, audit.exit_code, audit.findings) == ("running", 3, [])
                assert audit.places[-1].name == "unfinished"
            run.log_metrics(log.metrics(), step=i)
    balanced(tmp_path / "run")


# Tinker's files, as far as its loops write them: one directory per iteration, no tokens, no fates.


def write_tinker_run(path: Path, iterations: int = 3) -> Path:
    """The samples that a Tinker loop leaves, made here."""
    path.mkdir()
    metrics = []
    for i in range(iterations):
        directory = path / f"iteration_{i:06d}"
        directory.mkdir()
        rows = [tinker_row(i, group, number) for group in range(2) for number in range(3)]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (directory / "train_rollout_summaries.jsonl").write_text(lines)
        rewards = [row["total_reward"] for row in rows]
        metrics.append(
            {
                "step": i,
                "progress/batch": i,
                "optim/lr": 1e-5,
                "progress/done_frac": (i + 1) / iterations,
                "env/all/total_episodes": 6,
                "env/all/total_turns": 12,
                "env/all/total_ac_tokens": sum(step["ac_len"] for row in rows for step in row["steps"]),
                "env/all/reward/total": sum(rewards) / len(rewards),
                "optim/entropy": float("nan"),
            }
        )
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    (path / "config.json").write_text(json.dumps({"model_name": "m", "learning_rate": 1e-5}))
    return path


def tinker_row(i: int, group: int, number: int) -> dict[str, Any]:
    steps = [
        {"step_idx": at, "ob_len": 5, "ac_len": 1 + number, "reward": 0.5 * (at & group),
         "episode_done": at == 1, "metrics": {}, "logs": {}} for at in range(2)
    ]  # fmt: skip
    return {
        "schema_version": 1, "split": "train", "iteration": i, "group_idx": group, "traj_idx": number,
        "tags": ["a"], "sampling_client_step": i, "total_reward": 0.5 * group, "final_reward": 0.0,
        "trajectory_metrics": {}, "steps": steps, "final_ob_len": 0,
    }  # fmt: skip


def test_a_folder_of_tinker_is_counted_and_its_gaps_are_said(tmp_path: Path) -> None:
    run = write_tinker_run(tmp_path / "run")
    audit = balanced(run)
    assert (audit.kind, audit.done, audit.expected) == ("tinker", 3, 3)
    assert audit.places[0].rollouts == 18 and audit.places[0].tokens == 3 * 2 * 3 * 4
    assert any("which rollouts were trained" in line for line in audit.unanswered)
    summaries = run / "iteration_000001/train_rollout_summaries.jsonl"
    drop_line(summaries, 2)
    audit = rollbook.audit(run)
    found(audit, Kind.DIFFERS, "metrics.jsonl", line=2, key="env/all/total_episodes")
    shutil.copy(run / "iteration_000000/train_rollout_summaries.jsonl", summaries)
    assert "iteration 0" in found(
        rollbook.audit(run), Kind.FOREIGN, "iteration_000001/train_rollout_summaries.jsonl"
    ).what  # fmt: skip
    summaries.unlink()
    audit = rollbook.audit(run)
    found(audit, Kind.MISSING, "metrics.jsonl")
    assert audit.exit_code == 3


def test_a_tinker_loop_that_stopped_is_incomplete(tmp_path: Path) -> None:
    run = write_tinker_run(tmp_path / "run")
    shutil.rmtree(run / "iteration_000002")
    drop_line(run / "metrics.jsonl", 3)
    audit = rollbook.audit(run)
    assert "1 of 3" in found(audit, Kind.MISSING, "metrics.jsonl").what


@pytest.mark.parametrize("name", ["tinker_sync", "tinker_async", "tinker_sft"])
def test_real_folders_of_tinker_balance(peer_fixtures: Path, name: str) -> None:
    audit = balanced(peer_fixtures / name)
    assert audit.kind == "tinker" and audit.done == audit.expected and audit.unanswered


def test_a_fine_tuning_accounts_for_rows_tokens_and_steps(tmp_path: Path) -> None:
    changes = {"data__max_length": 40, "training__num_train_epochs": 2, "training__eval_steps": 4}
    config = write_config(tmp_path, **changes)
    long = {"messages": [{"role": "user", "content": "?" * 60}, {"role": "assistant", "content": "no"}]}
    rows = [*sums(20), long]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    export = "trainer={experimental: {token_export: {}}}"
    train(load_settings(config, [export]), tmp_path / "artifacts", log=lambda _: None)
    run = tmp_path / "artifacts/model/demo"
    audit = balanced(run)
    assert audit.kind == "sft" and audit.unit == "steps" and audit.done == audit.expected
    assert any("21 rows, 20 kept" in note and "1 dropped as too long" in note for note in audit.notes)
    checks = {check.name for check in audit.checks}
    assert {
        "tokens of the data that were trained in every epoch",
        "steps whose tokens are in the export",
    } <= checks
    edit_row(run / "trainer_log.jsonl", 2, lambda row: row.update(loss=0.5))
    found(rollbook.audit(run), Kind.DIFFERS, "trainer_log.jsonl", line=2, key="loss")
    drop_line(run / "token_exports/rank_0.jsonl", 3)
    assert [f for f in rollbook.audit(run).findings if f.file == "token_exports/rank_0.jsonl"]
    drop_line(run / "trainer_log.jsonl", 2)
    assert "step 2 has no line" in [f.what for f in rollbook.audit(run).findings if f.kind is Kind.MISSING]


def test_a_log_of_another_trainer(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    rows = [{"current_steps": step, "total_steps": 6, "loss": 1.0, "lr": 0.1} for step in (2, 4, 2, 4)]
    (run / "trainer_log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    audit = rollbook.audit(run)
    assert "2 of 6 steps" in found(audit, Kind.MISSING, "trainer_log.jsonl").what
    assert any("resumed" in note for note in audit.notes)
