"""The code a reader of the documented format would write works on a run we wrote.

Where the document itself lies beside the checkout, its three snippets are cut out of it and run verbatim.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from helpers.source_document import run_in, snippet


def test_metrics_snippet(sample_run: Path, tmp_path: Path) -> None:
    (tmp_path / "path").mkdir()
    shutil.copytree(sample_run, tmp_path / "path" / "to")
    code = snippet("metrics")
    check = "\nassert df['env/all/reward/total'].notna().all()\nprint(df['progress/batch'].tolist())"
    assert run_in(tmp_path, code + check).split("\n")[0] == str(list(range(21)))


def test_summaries_snippet(sample_run: Path) -> None:
    check = (
        "\nprint(json.dumps([sorted(t) for t in trajectories]))"
        "\nprint(json.dumps(sorted(trajectories[0]['steps'][0])))"
    )
    keys, step_keys = map(json.loads, run_in(sample_run, snippet("summaries") + check).splitlines())
    assert len(keys) == 24
    documented = (
        "schema_version split iteration group_idx traj_idx tags sampling_client_step "
        "total_reward final_reward trajectory_metrics final_ob_len steps"
    )
    assert all(set(documented.split()) <= set(line) for line in keys)
    assert {"step_idx", "ob_len", "ac_len", "reward", "episode_done", "metrics", "logs"} <= set(step_keys)


def test_logtree_snippet(sample_run: Path) -> None:
    printed = run_in(sample_run, snippet("logtree"))
    assert "user: What is " in printed
    assert "assistant: " in printed
    assert "tool: " in printed


def test_every_documented_file_is_there(sample_run: Path) -> None:
    names = {entry.name for entry in sample_run.iterdir()}
    expected = {"metrics.jsonl", "config.json", "checkpoints.jsonl", "code.diff", "run.json", "alerts.jsonl"}
    for base in ("train_iteration_000010", "eval_test_iteration_000020"):
        expected |= {f"{base}{end}" for end in (".html", "_logtree.json", "_rollout_summaries.jsonl")}
        expected.add(f"{base}_transcripts.jsonl")
    assert expected <= names


def test_documented_metrics_are_there(sample_run: Path) -> None:
    rows = [json.loads(line) for line in (sample_run / "metrics.jsonl").read_text().splitlines()]
    documented = {
        "progress/batch",
        "progress/done_frac",
        "env/all/reward/total",
        "env/all/correct",
        "env/all/format_parse",
        "ac_tokens_per_turn",
        "entropy",
        "kl_sample_train_v1",
        "kl_sample_train_v2",
        "optim/lr",
    }
    assert all(documented <= set(row) for row in rows)
    assert rows[3]["kl_sample_train_v2"] is None and rows[3]["nonfinite"] == ["kl_sample_train_v2"]
