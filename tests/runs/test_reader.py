"""Reading: our own runs, live ones, broken ones."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from rollbook import Run, Trajectory, open_run
from rollbook.errors import BadLineError, UsageError
from rollbook.records.metrics import merge_by_step, normalize, number_attempts


def test_frames(sample_run: Path) -> None:
    metrics = open_run(sample_run).metrics
    frame = metrics.to_pandas()
    assert len(frame) == 21
    assert str(frame["logged_at"].dtype).startswith("datetime64")
    assert math.isnan(frame["kl_sample_train_v2"][3])
    assert frame["step"].tolist() == list(range(21))
    table = metrics.to_arrow()
    assert table.num_rows == 21
    assert table["kl_sample_train_v2"].null_count == 1
    assert "entropy" in metrics.names() and "step" not in metrics.names()


def test_rollouts_by_iteration_and_split(sample_run: Path) -> None:
    run = open_run(sample_run)
    assert {r.split for r in run.rollouts(iteration=4)} == {"train", "eval/test"}
    assert {(r.iteration, r.split) for r in run.rollouts(4, "eval/test")} == {(4, "eval/test")}
    assert [i.iteration for i in run.iterations("eval/test")] == [0, 4, 8, 12, 16, 20]
    failed = [r for r in run.rollouts() if r.status == "error"]
    assert [(f.iteration, f.group_idx, f.traj_idx) for f in failed] == [(2, 1, 3), (2, 1, 3)][: len(failed)]
    assert failed[0].error.startswith("TimeoutError")


def test_conversations_have_ids_and_tools(sample_run: Path) -> None:
    conversations = list(open_run(sample_run).conversations(4, "train"))
    assert len(conversations) == 24
    with_tool = [c for c in conversations if any(m["role"] == "tool" for m in c.messages)]
    assert {c.group_idx for c in with_tool} == {2, 5}


def test_follow_sees_what_is_new_and_notices_a_rewind(tmp_path: Path) -> None:
    run = Run(tmp_path)
    follower = open_run(tmp_path).follow()
    follower.poll()
    run.log_metrics({"loss": 1.0}, step=0)
    (update,) = follower.poll()
    assert [row["loss"] for row in update.records] == [1.0]
    assert follower.poll() == []
    run.record_checkpoint("000001", batch=1)
    with run.rollouts(1) as rollouts, rollouts.group() as group:
        group.add(Trajectory.single_turn("q", "a", 1.0))
        sources = {update.source: update for update in follower.poll()}
        assert len(sources["rollouts"].records) == 1 and len(sources["transcripts"].records) == 1
    run.log_metrics({"loss": 0.5}, step=1)
    assert [update.source for update in follower.poll()] == ["metrics"]
    run.close()
    again = Run(tmp_path, resume=True)
    again.log_metrics({"loss": 0.25, "a longer line than before": 1.0}, step=1)
    updates = {update.path.name: update for update in follower.poll()}
    assert updates["metrics.jsonl"].restarted
    assert [row["loss"] for row in updates["metrics.jsonl"].records] == [1.0, 0.25]
    assert updates["train_iteration_000001_transcripts.jsonl"].restarted
    again.close()


def test_a_broken_line_names_file_and_line(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        run.log_metrics({"a": 1.0}, 0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "a"\n{"step": 2}\n')
    with pytest.raises(BadLineError, match=r"metrics\.jsonl:2"):
        list(open_run(tmp_path).metrics)


def test_a_line_being_written_is_not_an_error(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        run.log_metrics({"a": 1.0}, 0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "a"')
    assert len(list(open_run(tmp_path).metrics)) == 1


def test_wrong_paths_say_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file or directory"):
        open_run(tmp_path / "nothing")
    Run(tmp_path / "a-run").close()
    with pytest.raises(UsageError, match="a-run"):
        open_run(tmp_path)


def test_missing_logtree_names_the_iterations(sample_run: Path) -> None:
    with pytest.raises(UsageError, match=r"eval/test.*0, 4, 8"):
        open_run(sample_run).logtree(3, "eval/test")


def test_merging_and_attempts_of_files_that_were_not_rewound() -> None:
    steps = [0, 1, 2, 3, 4, 3, 4, 5]
    rows = [{"step": s, "progress/done_frac": s / 6, "loss": float(i)} for i, s in enumerate(steps)]
    rows.insert(4, {"step": 1, "test/score": 0.5})  # an evaluation that finished late is no new attempt
    numbered = list(number_attempts(rows))
    assert [attempt for attempt, _ in numbered] == [1, 1, 1, 1, 1, 1, 2, 2, 2]
    merged = merge_by_step(numbered)
    assert [row["step"] for row in merged] == [0, 1, 2, 3, 4, 5]
    assert [row["loss"] for row in merged] == [0.0, 1.0, 2.0, 5.0, 6.0, 7.0]
    assert merged[1]["test/score"] == 0.5


def test_foreign_names_become_the_documented_ones() -> None:
    row = normalize({"training_client/step": 3, "optim/entropy": 0.5, "time/x:total": 2.0, "time/x:count": 4})
    assert row == {
        "step": 3,
        "training_client/step": 3,
        "entropy": 0.5,
        "time/x:total": 2.0,
        "time/x": 2.0,
        "time/x:count": 4,
    }


class TestTinkerRuns:
    """Folders written by tinker-cookbook's own loops."""

    def test_sync(self, peer_fixtures: Path) -> None:
        run = open_run(peer_fixtures / "tinker_sync")
        rows = run.metrics.by_step()
        assert [row["step"] for row in rows] == [0, 1, 2, 3]
        assert all(
            {"entropy", "kl_sample_train_v1", "ac_tokens_per_turn", "optim/lr"} <= set(row) for row in rows
        )
        assert all("time/policy_sample" in row for row in rows)
        assert [(i.iteration, i.split) for i in run.iterations()] == [
            (0, "eval/test"),
            (0, "train"),
            (1, "train"),
            (2, "eval/test"),
            (2, "train"),
            (3, "train"),
        ]
        assert len(list(run.rollouts(0, "train"))) == 18
        assert {r.stop_reason for r in run.rollouts()} == {"completed"}
        conversations = list(run.conversations(0, "train"))
        assert any(
            "the answer is 4 <b>ok</b>" in json.dumps(conversation.messages) for conversation in conversations
        )
        assert run.checkpoints()[0].extra == {"rolling": True}
        assert run.latest_checkpoint().name == "final"
        assert run.config["model_name"] == "fake/model"

    def test_async(self, peer_fixtures: Path) -> None:
        run = open_run(peer_fixtures / "tinker_async")
        assert [row["step"] for row in run.metrics] == [0, 0, 1, 2, 2, 3, 4]
        assert {row["attempt"] for row in run.metrics} == {1}
        merged = run.metrics.by_step()
        assert [row["step"] for row in merged] == [0, 1, 2, 3, 4]
        assert "test/env/all/reward/total" in merged[0] and "entropy" in merged[0]
        assert list(run.rollouts())

    def test_sft(self, peer_fixtures: Path) -> None:
        run = open_run(peer_fixtures / "tinker_sft")
        rows = list(run.metrics)
        assert [row["step"] for row in rows] == list(range(8))
        assert all({"optim/lr", "progress/done_frac", "train_mean_nll"} <= set(row) for row in rows)
        assert run.iterations() == []

    def test_resumed(self, peer_fixtures: Path, tmp_path: Path) -> None:
        """Their resume repeats steps; both processes are told apart and the later one wins."""
        lines = (peer_fixtures / "tinker_sync/metrics.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / "metrics.jsonl").write_text("".join([*lines[:3], *lines[1:]]))
        metrics = open_run(tmp_path).metrics
        assert [(row["step"], row["attempt"]) for row in metrics] == [
            (0, 1),
            (1, 1),
            (2, 1),
            (1, 2),
            (2, 2),
            (3, 2),
        ]
        assert [row["attempt"] for row in metrics.by_step()] == [1, 2, 2, 2]
