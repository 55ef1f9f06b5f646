"""The token export: what it says is what the loss used, for every loss, cut and kind of token."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.exported_steps import examples, exported, lines
from rollbook.errors import UsageError
from rollbook.records.token_columns import DERIVED
from rollbook.records.token_files import RunIdentity, read_manifest
from rollbook.records.token_places import files_of
from rollbook.records.token_settings import TokenExportSettings, with_token_export
from rollbook.records.token_writers import to_parquet
from rollbook.records.tokens import TokenSequence, read_sequences
from rollbook.train.batch import packed_batch, padded_batch
from rollbook.train.engine import Engine
from rollbook.train.export import TokenExport, open_export
from rollbook.train.losses import (
    CrossEntropy,
    Dppo,
    ImportanceSampling,
    Ipo,
    Loss,
    LossOutput,
    PpoClip,
    ReferenceKl,
)
from rollbook.train.losses.base import LossInputs, weighted_sum
from rollbook.train.processes import Processes

LOSSES: list[Loss] = [
    CrossEntropy(), ImportanceSampling(), PpoClip(clip_low=0.1, clip_high=0.1),
    Dppo(mask_low=0.001, mask_high=0.002), Ipo(threshold=0.001), ReferenceKl(),
    PpoClip(clip_low=0, clip_high=0), Ipo(threshold=0),  # which leave out nearly all
]  # fmt: skip
MASKS = ("is_masked", "is_masked_high", "is_masked_low")


def same(found: float | None, wanted: float) -> bool:
    return found is None if not math.isfinite(wanted) else found == pytest.approx(wanted, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
@given(
    seed=st.integers(0, 1000),
    lengths=st.lists(st.integers(2, 14), min_size=1, max_size=6),
    is_packed=st.booleans(),
    steps=st.integers(1, 2),
)
@settings(max_examples=12, deadline=None)
def test_masks_and_ratios_are_those_that_the_loss_used(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: Any, engine: Engine, loss: Loss, seed: int,
    lengths: list[int], is_packed: bool, steps: int,
) -> None:  # fmt: skip
    root = tmp_path_factory.mktemp("run")
    engine.model.use_packing(is_packed)
    rows = examples(seed, lengths)
    make = packed_batch if is_packed else padded_batch
    batches = [[make(some) for some in (rows[:2], rows[2:]) if some] for _ in range(steps)]
    watched = exported(root, tokenizer, engine, batches, loss)
    records = lines(root)
    assert len(records) == len(rows) * steps
    left = dict(watched.seen)
    for record in records:
        example = rows[record["group_idx"] * 2 + record["traj_idx"]]
        assert record["token_ids"] == example.token_T.tolist()
        wanted_mask = [False, *example.trained_T[1:].tolist()]
        assert record["loss_mask"] == wanted_mask
        for offset, is_trained in enumerate(wanted_mask):
            values = {
                name: column[offset] for name, column in record.items()
                if isinstance(column, list) and name not in ("turns",)
            }  # fmt: skip
            if not is_trained:
                rest = {
                    v for k, v in values.items() if k not in ("token_ids", "position_ids", "text_offsets")
                }
                assert rest <= {None, False}
                continue
            key = record["optim_step"], record["group_idx"], record["traj_idx"], offset
            facts = left.pop(key)
            assert same(values["trainer_logprobs"], facts["logprob"])
            assert same(values["entropy"], facts["entropy"])
            assert values["advantages"] == pytest.approx(float(example.columns_T["advantage"][offset]))
            assert values["rewards"] == float(example.columns_T["reward"][offset])
            if isinstance(loss, CrossEntropy):
                assert all(record[name] is None for name in (*MASKS, "importance_ratio"))
                continue
            assert same(values["importance_ratio"], facts["ratio"])
            reason = int(facts["reason"])
            assert [values[name] for name in MASKS] == [reason != 0, reason == 1, reason == 2]
            mu, pi = float(example.columns_T["sampled_logprob"][offset]), facts["logprob"]
            assert same(values["inference_logprobs"], mu)
            log_ratio = pi - mu
            assert same(values["log_importance_ratio"], log_ratio)
            if math.isfinite(log_ratio):
                assert values["mismatch_kl"] == pytest.approx(
                    math.exp(log_ratio) - log_ratio - 1, rel=1e-3, abs=1e-6
                )
                assert values["prob_delta"] == pytest.approx(math.exp(pi) - math.exp(mu), rel=1e-4, abs=1e-8)
            else:
                shown = record["nonfinite"]["inference_logprobs"]
                assert [offset, str(mu)] in shown
    assert not left  # every token that the loss saw, once


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_single_token_that_is_not_finite_is_no_column_that_does_not_apply(
    tmp_path: Path, tokenizer: Any, engine: Engine, kind: Any, value: float
) -> None:
    engine.model.use_packing(True)
    (row,) = examples(1, [3], odd=False)
    row.trained_T[:] = [False, False, True]
    row.columns_T["sampled_logprob"][:] = value
    exported(tmp_path, tokenizer, engine, [[packed_batch([row])]], PpoClip(), format=kind)
    (file,) = files_of(tmp_path / "token_exports" / "manifest.jsonl")
    (sequence,) = read_sequences(file.path, end=file.end)
    column = sequence.get("inference_logprobs")
    assert column is not None and np.array_equal(column, [math.nan, math.nan, value], equal_nan=True)
    assert sequence.is_known("inference_logprobs").tolist() == [False, False, True]
    if kind == "jsonl":
        assert lines(tmp_path)[0]["nonfinite"]["inference_logprobs"] == [[2, str(value)]]


def test_a_record_says_where_it_belongs_and_needs_no_tokenizer(
    tmp_path: Path, tokenizer: Any, engine: Engine
) -> None:
    engine.model.use_packing(True)
    rows = examples(1, [8, 5, 6], odd=False)
    exported(tmp_path, tokenizer, engine, [[packed_batch(rows)]], PpoClip())
    first = lines(tmp_path)[0]
    assert {name: first[name] for name in ("run_id", "attempt", "split", "iteration", "step", "rank")} == {
        "run_id": "run-1", "attempt": 1, "split": "train", "iteration": 3, "step": 3, "rank": 0
    }  # fmt: skip
    assert (first["task_id"], first["env_name"], first["policy_version"]) == ("task-0", "sums", 4)
    assert lines(tmp_path)[2]["task_id"] is None  # nobody noted group 1
    data, begins = first["text"].encode(), [*first["text_offsets"], len(first["text"].encode())]
    pieces = [data[begins[n] : begins[n + 1]].decode() for n in range(8)]
    assert pieces == [tokenizer.decode([token]) for token in first["token_ids"]]
    for turn in first["turns"]:
        assert turn["temperature"] == pytest.approx(0.7) and turn["policy_version"] == 4
        assert first["loss_mask"][turn["start"]] and first["loss_mask"][turn["end"] - 1]
    assert sum(first["loss_mask"]) <= sum(turn["end"] - turn["start"] for turn in first["turns"])


def test_the_manifest_says_what_is_there(tmp_path: Path, tokenizer: Any, engine: Engine) -> None:
    engine.model.use_packing(True)
    rows = examples(2, [6, 7, 5, 9], odd=False)
    loss = PpoClip(clip_low=0.3)
    batch = packed_batch(rows)
    exported(tmp_path, tokenizer, engine, [[batch], [batch]], loss)
    (step,) = read_manifest(tmp_path / "token_exports" / "manifest.jsonl")
    assert step.loss == {"name": "ppo", "clip_low": 0.3, "clip_high": 0.28}
    assert step.applied == [True, True]
    assert (step.iteration, step.batch, step.sequences, step.records, step.complete) == (3, 4, 8, 8, True)
    assert step.trained_tokens == 2 * batch.trained_tokens and step.tokens == 2 * 27
    (part,) = step.ranks
    assert (part.rank, part.file, part.records) == (0, "rank_0.jsonl", 8)
    assert (part.sequences, part.selected, part.complete) == (8, 8, True)
    assert part.end == (tmp_path / "token_exports" / "rank_0.jsonl").stat().st_size


def test_a_step_that_was_not_applied_is_told(tmp_path: Path, tokenizer: Any, engine: Engine) -> None:
    """One of two, whose loss is not finite; the thresholds that are no settings stand there too."""
    engine.model.use_packing(True)
    good, bad = examples(2, [6, 7], odd=False), examples(2, [6, 7], odd=False)
    bad[0].columns_T["reference_logprob"][:] = np.nan
    steps = [[packed_batch(good)], [packed_batch(bad)]]
    exported(tmp_path, tokenizer, engine, steps, ReferenceKl(), fraction=0.6)
    (step,) = read_manifest(tmp_path / "token_exports" / "manifest.jsonl")
    assert step.applied == [True, False] and step.complete
    assert step.loss == {"name": "reference_kl", "mask_low": 0.2, "kl_tau": 0.001}
    (part,) = step.ranks
    assert (part.sequences, part.selected, part.complete) == (4, step.selected, True)


def test_a_step_without_records_is_marked(tmp_path: Path, tokenizer: Any) -> None:
    with TokenExport(
        TokenExportSettings(), tmp_path, RunIdentity("r", 1), tokenizer, Processes(), seed=0, alert=print
    ) as export:
        export.commit(0, PpoClip(), [], batch=1)
        export.commit(1, PpoClip(), [], batch=2)
        export.end_part(is_last=False)
    steps = list(read_manifest(tmp_path / "token_exports" / "manifest.jsonl"))
    assert [(step.iteration, step.records, step.complete) for step in steps] == [(0, 0, True), (1, 0, True)]


def test_the_last_part_is_whole_before_the_run_can_be_complete(
    tmp_path: Path, tokenizer: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody opens a complete run again to finish what another process had still to do."""
    engine.model.use_packing(True)

    def convert_late(stream: Path) -> Path:
        time.sleep(0.3)
        return to_parquet(stream)

    monkeypatch.setattr("rollbook.records.token_writers.to_parquet", convert_late)
    directory = tmp_path / "token_exports"
    with TokenExport(
        TokenExportSettings(format="parquet"), tmp_path, RunIdentity("r", 1), tokenizer, Processes(), seed=0,
        alert=print,
    ) as export:  # fmt: skip
        engine.step([packed_batch(examples(2, [6, 7]))], PpoClip(), 0.0, seen=export.seen(0, 0))
        export.commit(0, PpoClip(), [], batch=1)
        export.end_part(is_last=True)
        assert [path.name for path in directory.glob("rank_0_*")] == ["rank_0_000000.parquet"]


def test_every_and_fraction(tmp_path: Path, tokenizer: Any, engine: Engine) -> None:
    engine.model.use_packing(True)
    rows = examples(3, [5] * 40)
    chosen = {}
    for name, seed_of_order in (("one", 1), ("other", 2)):
        order = np.random.default_rng(seed_of_order).permutation(len(rows))
        batches = [[packed_batch([rows[place] for place in part]) for part in np.array_split(order, 3)]]
        exported(tmp_path / name, tokenizer, engine, batches, PpoClip(), fraction=0.4)
        found = lines(tmp_path / name)
        chosen[name] = {(record["group_idx"], record["traj_idx"]) for record in found}
    assert chosen["one"] == chosen["other"]  # the same trajectories, however they were batched
    assert 6 <= len(chosen["one"]) <= 28
    (step,) = read_manifest(tmp_path / "one" / "token_exports" / "manifest.jsonl")
    assert (step.sequences, step.selected, step.fraction) == (40, len(chosen["one"]), 0.4)
    with TokenExport(
        TokenExportSettings(every=2), tmp_path / "every", RunIdentity("r", 1), tokenizer, Processes(), seed=0,
        alert=print,
    ) as export:  # fmt: skip
        for iteration in range(4):
            engine.step([packed_batch(rows)], PpoClip(), 0.0, seen=export.seen(iteration, 0))
            export.commit(iteration, PpoClip(), [], batch=iteration + 1)
    assert [record["iteration"] for record in lines(tmp_path / "every")] == [0] * 40 + [2] * 40


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    "columns", [["entropy"], ["mismatch_kl"], ["prob_delta", "is_masked_low"], ["log_importance_ratio"]]
)
def test_columns_that_were_asked_for_are_there_and_no_others(
    tmp_path: Path, tokenizer: Any, engine: Engine, kind: Any, columns: list[str]
) -> None:
    """Parquet keeps what a derived column follows from in its place; a reader gets the same values."""
    engine.model.use_packing(True)
    batches = [[packed_batch(examples(3, [5, 9, 7], odd=False))]]

    def read(name: str, **given: Any) -> tuple[list[str], list[TokenSequence]]:
        exported(tmp_path / name, tokenizer, engine, batches, PpoClip(), format=kind, **given)
        manifest = tmp_path / name / "token_exports" / "manifest.jsonl"
        (step,), (file,) = read_manifest(manifest), files_of(manifest)
        return step.columns, list(read_sequences(file.path, end=file.end))

    _, whole = read("whole")
    named, found = read("few", columns=columns)
    logprobs = {"inference_logprobs", "trainer_logprobs"}
    sources = logprobs if kind == "parquet" and not {*DERIVED}.isdisjoint(columns) else set()
    assert set(named) == {"token_ids", "loss_mask", *columns, *sources}
    for one, other in zip(whole, found, strict=True):
        stored = other.columns.keys() - {"position_ids"}  # that any record has
        assert stored == {*named, *(DERIVED if sources else ())}
        for name in stored:
            assert np.array_equal(one.get(name), other.get(name), equal_nan=True), name


def test_a_loss_of_ones_own_without_facts_has_no_masks(
    tmp_path: Path, tokenizer: Any, engine: Engine
) -> None:
    class Plain(Loss, tag="plain", frozen=True, kw_only=True):
        def __call__(self, given: LossInputs) -> LossOutput:
            return LossOutput(weighted_sum(-given.column("advantage") * given.logprob_N, given), {})

    engine.model.use_packing(True)
    exported(tmp_path, tokenizer, engine, [[packed_batch(examples(4, [6, 6]))]], Plain())
    for record in lines(tmp_path):
        assert all(record[name] is None for name in (*MASKS, "importance_ratio"))
        assert record["mismatch_kl"] is not None


@pytest.mark.parametrize("path", ["a/x.jsonl", "a/x", "absolute"])
def test_a_path_of_ones_own_has_one_file_per_process(
    tmp_path: Path, tokenizer: Any, engine: Engine, path: str
) -> None:
    engine.model.use_packing(True)
    given = str(tmp_path / "elsewhere" / "x.jsonl") if path == "absolute" else path
    exported(
        tmp_path / "run", tokenizer, engine, [[packed_batch(examples(5, [6, 6]))]], PpoClip(), path=given
    )
    found = {
        "a/x.jsonl": tmp_path / "run" / "a" / "x_rank_0.jsonl",
        "a/x": tmp_path / "run" / "a" / "x" / "rank_0.jsonl",
        "absolute": tmp_path / "elsewhere" / "x_rank_0.jsonl",
    }[path]
    assert len(found.read_bytes().splitlines()) == 2
    assert not list((tmp_path / "run").glob("token_exports*"))


def test_files_of_others_are_not_touched(tmp_path: Path, tokenizer: Any) -> None:
    def opened(**given: Any) -> None:
        settings = TokenExportSettings(**given)
        with TokenExport(
            settings, tmp_path, RunIdentity("mine", 1), tokenizer, Processes(), seed=0, alert=print
        ) as export:
            export.commit(0, PpoClip(), [], batch=1)

    foreign = tmp_path / "theirs" / "rank_0.jsonl"
    foreign.parent.mkdir()
    foreign.write_text('{"step": 1}\n')
    with pytest.raises(UsageError, match="belongs to no run"):
        opened(path="theirs")
    assert foreign.read_text() == '{"step": 1}\n' and len(list(foreign.parent.iterdir())) == 1
    opened(path="ours")
    manifest = tmp_path / "ours" / "manifest.jsonl"
    manifest.write_text(manifest.read_text().replace("mine", "another"))
    with pytest.raises(UsageError, match="belongs to the run another"):
        opened(path="ours")
    with pytest.raises(UsageError, match="does not end in"):
        opened(path="x.parquet")


def test_off_is_an_object(tmp_path: Path, tokenizer: Any, engine: Engine) -> None:
    export = open_export(None, tmp_path, RunIdentity("r", 1), tokenizer, Processes(), seed=0, alert=print)
    with export:
        engine.step([packed_batch(examples(8, [6]))], PpoClip(), 0.0, seen=export.seen(0, 0))
        assert export.commit(0, PpoClip(), [], batch=1) == 0.0
    assert not list(tmp_path.iterdir())


def test_an_empty_block_turns_it_on() -> None:
    def block(value: Any) -> Any:
        values = with_token_export({"trainer": {"experimental": {"token_export": value}}, "seed": 1})
        assert values["seed"] == 1
        return values["trainer"]["experimental"]["token_export"]

    assert block(None) == {} and block({}) == {} and block(True) == {}
    assert block(False) is False and block({"every": 2}) == {"every": 2}
    with pytest.raises(UsageError, match="must be a block"):
        block("yes")
    with pytest.raises(ValueError, match="did you mean 'entropy'"):
        TokenExportSettings(columns=["entropi"])
