"""The token export of whole runs: joined to the rollouts, on several processes, after kills."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import rollbook
from helpers.equal_runs import differences
from helpers.kills import KilledRun
from helpers.rl_runs import settings_of, write_setup
from helpers.trainer import run_several
from rollbook.errors import WriteError
from rollbook.query.session import Session
from rollbook.records.iterations import Fate, read_iterations
from rollbook.records.token_files import read_manifest
from rollbook.records.token_masks import ppo_masks
from rollbook.records.token_places import files_of, token_source
from rollbook.records.token_writers import JsonWriter
from rollbook.records.tokens import TokenSequence, read_sequences
from rollbook.records.transcripts import Transcript
from rollbook.rl.replay.what_if import what_if
from rollbook.rl.settings import RlSettings, load_settings
from rollbook.rl.train import train
from rollbook.tokens.report import token_report

KINDS = ("jsonl", "parquet")
CLIP = 0.0001


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_setup(tmp_path_factory.mktemp("rl"))


def exporting(setup: Path, log_path: Path, *, export: Any = None, **changes: Any) -> RlSettings:
    """Losses that mask, several optimiser steps, and the export on."""
    loss = {"name": "ppo", "clip_low": CLIP, "clip_high": CLIP}
    block = {"experimental": {"token_export": export}}
    return settings_of(
        setup, log_path, **({"loss": loss, "minibatches": 2, "trainer": block, "evals": []} | changes)
    )


def sequences(manifest: Path) -> list[TokenSequence]:
    found = []
    for file in files_of(manifest):
        found += read_sequences(file.path, end=file.end)
    return found


def manifest_of(run: Path) -> Path:
    return run / "token_exports" / "manifest.jsonl"


def transcripts(run: Path) -> dict[tuple[int, int, int], Transcript]:
    found = {}
    for path in run.glob("train_iteration_*_transcripts.jsonl"):
        for line in path.read_bytes().splitlines():
            record = Transcript.from_plain(json.loads(line))
            found[record.iteration, record.group_idx, record.traj_idx] = record
    return found


def test_an_empty_block_exports_every_trained_rollout(setup: Path, tmp_path: Path) -> None:
    train(exporting(setup, tmp_path / "run"), log=lambda _: None)
    follow(tmp_path / "run", processes=1)
    joined = (
        "select count(*), count(*) filter (t.reward <> r.reward), "
        "count(distinct (iteration, group_idx, traj_idx)) from tokens t "
        "join rollouts r using (run, split, iteration, group_idx, traj_idx) where t.loss_mask"
    )
    manifest = list(read_manifest(manifest_of(tmp_path / "run")))
    answer = Session([tmp_path / "run"]).run(joined)
    assert [row for batch in answer.batches for row in batch] == [
        (sum(step.trained_tokens for step in manifest), 0, sum(step.records for step in manifest))
    ]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert all(line["time/token_export"] > 0 for line in lines)


def test_the_metrics_of_the_loss_are_those_of_every_exported_token(setup: Path, tmp_path: Path) -> None:
    """With several steps per batch the loss leaves tokens out after the first one, so all of them count."""
    run = tmp_path / "run"
    loss = {"name": "ppo", "clip_low": 0.01, "clip_high": 0.01}
    several = {"minibatches": 3, "epochs": 3, "learning_rate": 0.02, "iterations": 2}
    train(exporting(setup, run, loss=loss, **several), log=lambda _: None)
    source = token_source(run)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    for line in lines:
        report = token_report(source, iteration=line["step"])
        total, first = report.total, report.first_step
        assert first is not None and line["optim/steps"] == 9
        assert line["loss/kept"] == pytest.approx(1 - total.masked_share)
        assert line["loss/clipped_high"] == pytest.approx(total.masked_high_share)
        assert line["loss/clipped_low"] == pytest.approx(total.masked_low_share)
        assert line["loss/ratio_max"] > 1.01 > 0.99 > line["loss/ratio_min"]
        assert first.inference_logprob is not None and first.trainer_logprob is not None
        difference = first.inference_logprob - first.trainer_logprob
        assert line["kl_sample_train_v1"] == pytest.approx(difference, abs=1e-9)
        assert line["kl_sample_train_v3"] == pytest.approx(first.mismatch_kl, abs=1e-9)
        assert line["entropy"] == pytest.approx(first.entropy, rel=1e-6)
        assert line["loss/ess"] == pytest.approx(1.0)  # of the first step, like the agreement
        recorded = what_if(run, line["step"], "learning_rate=0.01").recorded
        assert recorded.masked == pytest.approx(1 - line["loss/kept"])
        assert recorded.masked_high == pytest.approx(line["loss/clipped_high"])
        assert recorded.masked_low == pytest.approx(line["loss/clipped_low"])
        assert recorded.ratio == pytest.approx(line["loss/ratio"])
    assert max(line["loss/clipped_high"] + line["loss/clipped_low"] for line in lines) > 0.2


def follow(run: Path, *, processes: int) -> None:
    """Every trained rollout from what the environment said to the tokens in the export, and nothing else."""
    told = transcripts(run)
    fates = {
        (record.iteration, fate.group_idx, fate.traj_idx): fate
        for record in read_iterations(run / "iterations.jsonl")
        for fate in record.rollouts or ()
        if record.split == "train"
    }
    found = {}
    for sequence in sequences(manifest_of(run)):
        key = sequence.iteration, sequence.group_idx, sequence.traj_idx
        assert key not in found
        found[key] = sequence
    assert found.keys() == {key for key, fate in fates.items() if fate.fate is Fate.TRAINED}
    assert {sequence.rank for sequence in found.values()} == set(range(processes))
    for key, sequence in found.items():
        transcript = told[key]
        (turn,) = transcript.to_turns()
        prompt = len(turn.prompt_token_ids or ())
        ids = [*(turn.prompt_token_ids or ()), *(turn.token_ids or ())]
        assert sequence.token_ids.tolist() == ids
        assert sequence.columns["loss_mask"].tolist() == [False] * prompt + [True] * (len(ids) - prompt)
        # The reward is what the environment gave this turn: a vowel in the reply or none.
        said = transcript.messages[-1]["content"] if len(transcript.messages) > 1 else ""
        assert transcript.total_reward == float(any(vowel in said for vowel in "aeiou"))
        assert sequence.columns["rewards"][prompt:].tolist() == [transcript.total_reward] * (
            len(ids) - prompt
        )
        wanted = fates[key].advantage
        assert sequence.columns["advantages"][prompt:].tolist() == [
            pytest.approx(wanted, rel=1e-6)
        ] * (len(ids) - prompt)  # fmt: skip
        assert sequence.columns["inference_logprobs"][prompt:].tolist() == pytest.approx(turn.logprobs)
        assert sequence.task_id == transcript.task_id and sequence.policy_version == key[0]
    follow_masks(list(found.values()), processes)


def follow_masks(found: Sequence[TokenSequence], processes: int) -> None:
    """The masks are those of the loss by its formula, on every process, of packed rows too."""
    counts = dict.fromkeys(range(processes), np.zeros(2, np.int64))
    for sequence in found:
        advantage, ratio = (sequence.columns[name] for name in ("advantages", "importance_ratio"))
        assert advantage is not None and ratio is not None and advantage.dtype == ratio.dtype == np.float32
        wanted = ppo_masks(advantage, ratio, clip_low=CLIP, clip_high=CLIP)
        for name, mask in zip(("is_masked_high", "is_masked_low"), wanted, strict=True):
            assert np.array_equal(sequence.columns[name], mask), name
        assert np.array_equal(sequence.columns["is_masked"], wanted[0] | wanted[1])
        counts[sequence.rank] = counts[sequence.rank] + [mask.sum() for mask in wanted]
    for rank, (high, low) in counts.items():
        assert high > 0 and low > 0, f"process {rank} has masked {high} high and {low} low"
        in_batch = Counter((one.iteration, one.micro_step) for one in found if one.rank == rank)
        assert max(in_batch.values()) > 1, f"process {rank} has packed no two rows"


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_write_a_file_each_also_to_one_path(setup: Path, tmp_path: Path, kind: str) -> None:
    ending = {"jsonl": "x.jsonl", "parquet": "x.parquet"}[kind]
    settings = exporting(
        setup, tmp_path / "run", processes=2, iterations=4, export={"path": ending, "format": kind}
    )
    environment = {"ROLLBOOK_SETTINGS": msgspec.json.encode(settings).decode()}
    run_several(2, "rollbook.rl.main", "--artifacts", tmp_path / "artifacts", **environment)
    manifest = tmp_path / "run" / "x_manifest.jsonl"
    (tmp_path / "run" / "token_exports").mkdir()
    steps = list(read_manifest(manifest))
    assert [step.iteration for step in steps] == [0, 1, 2, 3]
    for step in steps:
        assert [part.rank for part in step.ranks] == [0, 1] and step.complete
        assert step.records == sum(part.records for part in step.ranks) == step.sequences
    files = files_of(manifest)
    assert len({file.path.name[:8] for file in files}) == 2
    manifest.rename(manifest_of(tmp_path / "run"))  # where `follow` looks
    for file in files:
        file.path.rename(tmp_path / "run" / "token_exports" / file.path.name)
    follow(tmp_path / "run", processes=2)


# Whose every moment is in tests/faults/test_killed_rl.py.
MOMENTS = {
    "jsonl": ["half write token_exports/rank_0.jsonl", "after write token_exports/manifest.jsonl"],
    "parquet": [
        "half write token_exports/rank_0_N.arrows",
        "half write token_exports/.rank_0_N.parquet.tmp",
        "before unlink token_exports/rank_0_N.arrows",
        "half write token_exports/manifest.jsonl",
    ],
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_killed_exports_what_an_untouched_one_does(
    setup: Path, tmp_path: Path, kind: str
) -> None:
    whole, settings = (
        exporting(setup, tmp_path / name, export={"format": kind}) for name in ("whole", "run")
    )
    train(whole, log=lambda _: None)
    run = KilledRun(settings)
    for moment in MOMENTS[kind]:
        assert run.kill_at(moment), moment
    run.end(Path(whole.log_path))


def test_the_export_changes_nothing_of_the_training(setup: Path, tmp_path: Path) -> None:
    train(exporting(setup, tmp_path / "on", export={"format": "parquet"}), log=lambda _: None)
    train(exporting(setup, tmp_path / "off", export=False), log=lambda _: None)
    names = [line for line in differences(tmp_path / "on", tmp_path / "off") if "token_exports" not in line]
    assert [line for line in names if not line.startswith("config.json")] == []


def test_a_full_disk_ends_the_export_and_a_resume_completes_it(
    setup: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, plain = tmp_path / "run", JsonWriter.write

    def write(self: JsonWriter, records: Any, iteration: int) -> None:
        if iteration >= 3:
            raise WriteError("rank_0.jsonl: append failed: the disk is full")
        plain(self, records, iteration)

    monkeypatch.setattr(JsonWriter, "write", write)
    train(exporting(setup, log, iterations=5), log=lambda _: None)
    monkeypatch.undo()
    assert len(list(read_iterations(log / "iterations.jsonl"))) == 5  # the run went on
    alerts = [json.loads(line) for line in (log / "alerts.jsonl").open()]
    (alert,) = [alert for alert in alerts if alert["title"] == "the token export has stopped"]
    assert "the disk is full" in alert["text"]
    assert [step.complete for step in read_manifest(manifest_of(log))] == [True] * 3 + [False] * 2
    gaps = token_report(token_source(log)).incomplete
    assert [(gap.iteration, gap.records) for gap in gaps] == [(3, 0), (4, 0)]
    assert all(gap.selected and "the disk is full" in gap.errors[0] for gap in gaps)
    assert token_report(token_source(log)).not_exported == []
    manifest = manifest_of(log).read_bytes().splitlines(keepends=True)
    manifest_of(log).write_bytes(b"".join(manifest[:4]))  # a line that was waiting for room, and a kill
    assert token_report(token_source(log)).not_exported == [4]
    assert token_report(token_source(log), iteration=2).not_exported == []
    (lost,) = [one for one in rollbook.audit(log).findings if "is in no token export" in one.what]
    assert "iteration 4" in lost.what and "rollbook replay" in lost.next and "restore" not in lost.next
    train(exporting(setup, log, iterations=5), resume="000002", log=lambda _: None)
    assert [step.complete for step in read_manifest(manifest_of(log))] == [True] * 5
    follow(log, processes=1)


def test_off_and_on_again_on_resume(setup: Path, tmp_path: Path) -> None:
    """An old export is taken back with the run, even if the new settings have none."""
    log = tmp_path / "run"
    train(exporting(setup, log, iterations=4), log=lambda _: None)
    train(exporting(setup, log, iterations=6, export=False), resume=True, log=lambda _: None)
    assert [step.iteration for step in read_manifest(manifest_of(log))] == [0, 1, 2, 3]
    train(exporting(setup, log, iterations=8), resume=True, log=lambda _: None)
    assert [step.iteration for step in read_manifest(manifest_of(log))] == [0, 1, 2, 3, 6, 7]
    assert token_report(token_source(log)).not_exported == []  # nobody asked for 4 and 5
    train(exporting(setup, log, iterations=8), resume="000002", log=lambda _: None)
    assert [step.iteration for step in read_manifest(manifest_of(log))] == [*range(8)]
    follow(log, processes=1)


def test_the_settings_of_a_finished_run_are_settings_again(setup: Path, tmp_path: Path) -> None:
    train(exporting(setup, tmp_path / "off", export=False, iterations=1), log=lambda _: None)
    assert load_settings(tmp_path / "off" / "config.json").trainer.token_export is None
    train(exporting(setup, tmp_path / "on", iterations=1), log=lambda _: None)
    assert load_settings(tmp_path / "on" / "config.json").trainer.token_export is not None
