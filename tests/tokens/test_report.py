"""The numbers of `rollbook tokens`, against the same counted one token at a time."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest

from helpers.token_exports import CLIP, PROMPT, Export
from rollbook import Trajectory
from rollbook.errors import UsageError
from rollbook.records.token_places import token_source
from rollbook.records.turns import Turn
from rollbook.runs.run import Run
from rollbook.tokens import chunks
from rollbook.tokens.by_text import Sign
from rollbook.tokens.report import TokenReport, token_report
from rollbook.tokens.totals import Band, position_label


def report_of(root: Path, **options: Any) -> TokenReport:
    return token_report(token_source(root), **options)


def tokens_of(root: Path) -> list[dict[str, Any]]:
    """Every trained token with its values, one by one."""
    found = []
    for piece in token_source(root).pieces():
        for sequence in piece.read():
            for offset in np.flatnonzero(sequence.sampled):
                values = {
                    name: column[offset].item()
                    for name, column in sequence.columns.items()
                    if column is not None
                }
                turn = sequence.turns[int(sequence.turn_of[offset])]
                text = sequence.pieces[offset] if sequence.pieces is not None else None
                found.append(
                    values
                    | {"text": text, "turn": turn.step_idx, "rank": sequence.rank, "offset": int(offset)}
                    | {"iteration": sequence.iteration, "env": sequence.env_name, "sequence": sequence}
                )
    return found


def test_totals_and_breakdowns_are_those_of_the_tokens(tmp_path: Path) -> None:
    Export().write(tmp_path)
    report, tokens = report_of(tmp_path, band=Band(0.95, 1.2)), tokens_of(tmp_path)
    assert report.total.tokens == len(tokens) == 3 * 2 * 4 * (24 - PROMPT - 2)
    assert (report.sequences, report.iterations) == (24, [0, 2])
    for name, breakdown in (
        ("env", report.by_environment), ("iteration", report.by_iteration), ("turn", report.by_turn),
        ("position", report.by_position), ("reply position", report.by_reply_position),
    ):  # fmt: skip
        assert len(breakdown) > 1
        for row in breakdown:
            mine = [one for one in tokens if key_of(one, name) == row.key]
            finite = [one["mismatch_kl"] for one in mine if math.isfinite(one["mismatch_kl"])]
            outside = [not 0.95 <= one["importance_ratio"] <= 1.2 for one in mine]
            assert row.tokens == len(mine)
            assert row.masked == sum(one["is_masked"] for one in mine)
            assert row.masked_share == pytest.approx(row.masked / len(mine))
            assert row.masked_high_share == pytest.approx(
                sum(one["is_masked_high"] for one in mine) / len(mine)
            )
            assert row.outside_share == pytest.approx(sum(outside) / len(mine))
            assert row.mismatch_kl == pytest.approx(sum(finite) / len(finite), rel=1e-5)
            assert row.mismatch_kl_max == pytest.approx(max(finite))
            assert row.entropy == pytest.approx(sum(one["entropy"] for one in mine) / len(mine))
            assert row.nonfinite == len(mine) - len(finite)
        assert sum(row.tokens for row in breakdown) == len(tokens)
    pull = [abs(one["advantages"]) * one["importance_ratio"] for one in tokens]
    masked_pull = [p for p, one in zip(pull, tokens, strict=True) if one["is_masked"]]
    assert report.total.masked_pull_share == pytest.approx(sum(masked_pull) / sum(pull))
    assert report.total.nonfinite == 1


def key_of(token: dict[str, Any], name: str) -> Any:
    if name == "position":
        return position_label(0 if token["offset"] < 16 else 16)
    if name == "reply position":
        place = token["offset"] - token["sequence"].turns[token["turn"]].start
        return "0" if place == 0 else "1-3" if place < 4 else "4-15"
    return token[name]


def test_masked_tokens_are_counted_by_text_and_sign(tmp_path: Path) -> None:
    Export().write(tmp_path)
    report, tokens = report_of(tmp_path, most=3), tokens_of(tmp_path)
    for sign, side in report.masked_by_text.items():
        mine = [
            one
            for one in tokens
            if np.sign(one["advantages"]) == {"positive": 1, "negative": -1}.get(sign, 0)
        ]
        masked = Counter(one["text"] for one in mine if one["is_masked"])
        seen = Counter(one["text"] for one in mine)
        assert (side.seen, side.masked, side.texts) == (len(mine), masked.total(), len(masked))
        assert [one.masked for one in side.top] == sorted(masked.values(), reverse=True)[:3]
        for one in side.top:
            assert (one.masked, one.seen) == (masked[one.text], seen[one.text])
            assert one.share == pytest.approx(one.masked / side.masked)
            assert one.masked_share == pytest.approx(one.masked / one.seen)
    assert report.masked_by_text[Sign.POSITIVE].masked > 0 < report.masked_by_text[Sign.NEGATIVE].masked


def test_the_largest_mismatch_stands_first_with_its_words(tmp_path: Path) -> None:
    Export().write(tmp_path)
    report, tokens = report_of(tmp_path, most=6), tokens_of(tmp_path)
    first, *others = report.top
    assert (first.mismatch_kl, first.trainer_logprob) == (None, None)  # infinite, and before all others
    assert (first.iteration, first.rank, first.group_idx, first.traj_idx, first.token_idx) == (0, 0, 0, 0, 23)
    finite = sorted((one["mismatch_kl"] for one in tokens if math.isfinite(one["mismatch_kl"])), reverse=True)
    assert [one.mismatch_kl for one in others] == finite[:5]
    for one in report.top:
        (token,) = [
            token for token in tokens
            if (token["iteration"], token["rank"], token["sequence"].traj_idx, token["offset"])
            == (one.iteration, one.rank, one.traj_idx, one.token_idx)
        ]  # fmt: skip
        assert (one.text, one.step_idx, one.masked) == (token["text"], token["turn"], token["is_masked"])
        pieces = token["sequence"].pieces
        assert one.before == "".join(pieces[max(0, one.token_idx - 8) : one.token_idx])
        assert one.after == "".join(pieces[one.token_idx + 1 : one.token_idx + 5])


@pytest.mark.parametrize("loud", [None, 2])
def test_a_process_that_differs_is_named(tmp_path: Path, loud: int | None) -> None:
    Export(processes=4, iterations=6, loud=loud).write(tmp_path)
    rows = report_of(tmp_path).by_rank
    assert [row.rank for row in rows] == [0, 1, 2, 3]
    assert [row.rank for row in rows if row.is_outlier] == ([] if loud is None else [loud])
    assert sum(row.sequences for row in rows) == 6 * 4 * 4


def test_kind_of_file_and_size_of_chunks_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plain(name: str, **options: Any) -> Any:
        report = report_of(tmp_path / name, what_if=["clip_high=0.3"], **options)
        return rounded(msgspec.to_builtins(report, str_keys=True) | {"path": None})

    Export().write(tmp_path / "lines")
    Export(kind="parquet").write(tmp_path / "parts", is_open=True)
    whole = plain("lines")
    assert plain("parts") == whole
    monkeypatch.setattr(chunks, "_TOKENS", 1)
    assert plain("lines") == whole
    one = plain("lines", iteration=1)
    assert one["iterations"] == [1, 1] and one["total"]["tokens"] == whole["total"]["tokens"] / 3
    assert [row["key"] for row in one["by_iteration"]] == [1]


def rounded(value: Any) -> Any:
    """Sums in another order differ in their last bits."""
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(one) for one in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def test_what_if_says_what_other_thresholds_would_leave_out(tmp_path: Path) -> None:
    Export().write(tmp_path)
    tokens = tokens_of(tmp_path)
    same, wide, none, dppo = report_of(
        tmp_path,
        what_if=[f"clip_high={CLIP}", "clip_high=0.4,clip_low=0.05", "name=cross_entropy", "name=dppo"],
    ).what_if
    masked = sum(one["is_masked"] for one in tokens)
    assert (same.masked, same.was_masked, same.more, same.fewer) == (masked, masked, 0, 0)
    assert same.loss == {"name": "ppo", "clip_low": CLIP, "clip_high": CLIP}
    high = [one["advantages"] > 0 and one["importance_ratio"] > 1.4 for one in tokens]
    low = [one["advantages"] < 0 and one["importance_ratio"] < 0.95 for one in tokens]
    assert (wide.tokens, wide.high, wide.low) == (len(tokens), sum(high), sum(low))
    both = [h or lo for h, lo in zip(high, low, strict=True)]
    was = [one["is_masked"] for one in tokens]
    assert wide.more == sum(new and not old for new, old in zip(both, was, strict=True))
    assert wide.fewer == sum(old and not new for new, old in zip(both, was, strict=True))
    assert (none.masked, none.fewer) == (0, masked)
    assert dppo.loss == {"name": "dppo", "mask_low": 0.2, "mask_high": 0.2}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("clip_hihg=0.4", "the loss 'ppo' has no bound 'clip_hihg'; did you mean 'clip_high'"),
        (
            "name=dppo,clip_high=1",
            "the loss 'dppo' has no bound 'clip_high'; its bounds: mask_low, mask_high",
        ),
        ("name=mine", "the bounds of the loss 'mine' are not known"),
        ("clip_high", "'clip_high' is no name=value"),
        ("clip_high=much", "clip_high must be a number, not 'much'"),
        ("clip_high=-1", "clip_high must be 0 or more"),
        ("clip_high=nan", "clip_high must be 0 or more"),
    ],
)
def test_a_wrong_scenario_says_what_is_right(tmp_path: Path, words: str, why: str) -> None:
    Export(iterations=1).write(tmp_path)
    with pytest.raises(UsageError) as error:
        report_of(tmp_path, what_if=[words])
    assert why in str(error.value)


def test_an_export_without_a_manifest_needs_the_name_of_a_loss(peer_fixtures: Path) -> None:
    with pytest.raises(UsageError, match="does not say which loss it was; name one"):
        report_of(peer_fixtures / "prime_rl", what_if=["mask_high=0.1"])
    (dppo,) = report_of(peer_fixtures / "prime_rl", what_if=["name=dppo"]).what_if
    assert dppo.was_masked == dppo.masked > 0 and dppo.more == dppo.fewer == 0


def test_rows_that_are_missing_are_told(tmp_path: Path) -> None:
    files = Export().write(tmp_path)
    lines = files.manifest.read_bytes().splitlines()
    last = orjson.loads(lines[2])
    last |= {"selected": 9, "complete": False, "applied": [True, False, False]}
    last["ranks"][1] = {"rank": 1, "error": "the disk is full"}
    files.manifest.write_bytes(b"\n".join([*lines[:2], orjson.dumps(last)]) + b"\n")
    (gap,) = report_of(tmp_path).incomplete
    assert (gap.iteration, gap.selected, gap.records, gap.errors) == (
        2,
        9,
        8,
        ["process 1: the disk is full"],
    )
    (void,) = report_of(tmp_path).not_applied
    assert (void.iteration, void.optim_steps) == (2, [1, 2])
    before = report_of(tmp_path, iteration=1)
    assert before.incomplete == [] and before.not_applied == []


def test_the_noise_floor_stands_beside_the_mismatch(tmp_path: Path) -> None:
    Export().write(tmp_path)
    rows = [
        {"step": i, "noise_floor/k3": 0.1 * (i + 1), "noise_floor/outside": 0.02, "noise_floor/max": i}
        for i in (0, 2)
    ]
    (tmp_path / "metrics.jsonl").write_bytes(
        b"".join(orjson.dumps(row) + b"\n" for row in [*rows, {"step": 1}])
    )
    whole = report_of(tmp_path).noise_floor
    assert whole is not None and whole.iterations == [0, 2]
    assert (whole.mismatch_kl, whole.largest, whole.outside_share) == (pytest.approx(0.2), 2.0, 0.02)
    before = report_of(tmp_path, iteration=1).noise_floor
    assert before is not None and (before.iterations, before.mismatch_kl) == ([0], pytest.approx(0.1))


def test_an_export_with_few_columns_says_what_it_can(tmp_path: Path) -> None:
    Export(columns=["entropy"]).write(tmp_path)
    report = report_of(tmp_path)
    assert report.total.entropy is not None and report.total.tokens > 0
    assert (
        report.total.masked is None
        and report.total.mismatch_kl is None
        and report.total.outside_share is None
    )
    assert report.masked_by_text[Sign.POSITIVE].seen == 0 and report.top == [] and report.by_rank == []


def test_without_an_export_there_are_the_samplers_logprobs(tmp_path: Path) -> None:
    turn = Turn(
        messages=[{"role": "assistant", "content": "x"}], prompt_token_ids=[1], token_ids=[2, 3],
        logprobs=[-0.5, -2.5],
    )  # fmt: skip
    with (
        Run(tmp_path, total_iterations=1) as run,
        run.rollouts(iteration=0) as rollouts,
        rollouts.group(0, task_id="t", size=1) as group,
    ):
        group.add(Trajectory(turns=[turn]))
    report = report_of(tmp_path)
    assert not report.is_exported
    assert (report.total.tokens, report.total.inference_logprob) == (2, -1.5)
    assert report.total.masked is None and report.total.mismatch_kl is None
    assert [(one.token_id, one.inference_logprob) for one in report.top] == [(3, -2.5), (2, -0.5)]
    with pytest.raises(UsageError, match="no tokens here"):
        report_of(tmp_path, iteration=5)


def test_an_empty_place_says_how_to_switch_the_export_on(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no tokens here(.|\n)*token_export:"):
        report_of(tmp_path)
