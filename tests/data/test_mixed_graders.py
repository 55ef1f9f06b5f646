"""Rewards of different graders: a warning that says what differs, and no pairs across them unasked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import rollbook
from collecting import ROLLBOOK, row, write_rows
from recorded import python
from rollbook.data.filter import filter_rows
from rollbook.data.merge import merge
from rollbook.data.pairs import pairs
from rollbook.data.profile import profile
from rollbook.errors import UsageError
from rollbook.records.datasets import manifest_path, read_manifest
from rollout_rows import read

EXACT = {"name": "dataset", "grader": "exact"}
NUMBER = {"name": "dataset", "grader": "number"}


def collected(
    directory: Path, name: str, env: dict[str, Any], answers: list[str], tasks: str = "t", **words: Any
) -> Path:
    tasks_file = write_rows(directory / f"{tasks}_in.jsonl", [row(f"{tasks}{number}") for number in range(3)])
    agent = {"env": env, "policy": {"kind": "scripted", "script": answers}}
    output = directory / f"{name}.jsonl"
    files = {"input_jsonl_fpath": str(tasks_file), "output_jsonl_fpath": str(output)}
    rollbook.collect({"agents": {"a": agent}, "agent_name": "a", **files, **words})
    return output


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    """Two collections of the same tasks, the right answers in one, whose graders differ."""
    return [
        collected(tmp_path, "a", EXACT, ["2"]),
        collected(tmp_path, "b", NUMBER, ["It is 3"]),
    ]


def test_what_differs_is_said(two: list[Path], tmp_path: Path) -> None:
    expected = [f"{two[0]} -> {two[1]}: grader: 'exact' -> 'number'"]
    assert merge(two, tmp_path / "m.jsonl", duplicates="first").details["different_graders"] == expected  # type: ignore[arg-type]
    assert profile(two, None).details["different_graders"] == expected
    for verb in (["profile"], ["merge", "--duplicates=first", "-o", str(tmp_path / "n.jsonl")]):
        ran = python(*ROLLBOOK[1:], "data", *verb, *two, "--json")
        assert f"warning: the rewards were given by different graders:\n  {expected[0]}" in ran.stderr
        json.loads(ran.stdout)


def test_one_grader_or_an_unknown_one_is_no_difference(tmp_path: Path) -> None:
    first = collected(tmp_path, "a", EXACT, ["2"])
    other = collected(tmp_path, "b", EXACT, ["3"])
    unknown = tmp_path / "unknown.jsonl"
    shutil.copy(collected(tmp_path, "c", NUMBER, ["4"]), unknown)
    manifest = pairs([first, other, unknown], tmp_path / "p.jsonl")
    assert "different_graders" not in manifest.details
    assert manifest.rows_out == 3


def test_pairs_across_graders_are_refused_unless_allowed(two: list[Path], tmp_path: Path) -> None:
    output = tmp_path / "p.jsonl"
    with pytest.raises(UsageError) as refused:
        pairs(two, output)
    assert str(refused.value).startswith("3 of 3 pairs would compare the rewards of different graders:\n")
    assert "grader: 'exact' -> 'number'" in str(refused.value)
    assert not output.exists() and not manifest_path(output).exists()
    assert pairs(two, output, allow_different_graders=True).rows_out == 3
    ran = python(*ROLLBOOK[1:], "data", "pairs", *two, "-o", tmp_path / "q.jsonl")
    assert ran.returncode == 2 and "--allow-different-graders" in ran.stderr


def test_tasks_that_never_meet_are_paired_with_a_warning(tmp_path: Path) -> None:
    """Different graders are no harm to pairs that each have one."""
    files = [
        collected(tmp_path, f"{tasks}{answer}", env, [answer], tasks=tasks)
        for tasks, env in (("t", EXACT), ("u", NUMBER))
        for answer in ("2", "3")
    ]
    manifest = pairs(files, tmp_path / "p.jsonl")
    assert manifest.rows_out == 6
    assert len(manifest.details["different_graders"]) == 1


def test_a_dataset_made_of_others_knows_their_graders(two: list[Path], tmp_path: Path) -> None:
    """Also when the collections are gone: rows of a file with several graders say not whose they are."""
    kept = [tmp_path / f"kept_{path.name}" for path in two]
    for path, output in zip(two, kept, strict=True):
        filter_rows([path], output, where="reward is not null")
        path.unlink()
        manifest_path(path).unlink()
    assert "'exact' -> 'number'" in profile(kept, None).details["different_graders"][0]
    both = tmp_path / "both.jsonl"
    graders = merge(kept, both, duplicates="first").graders  # type: ignore[arg-type]
    assert [one["grader"] for one in graders] == ["exact", "number"]
    assert f"within {both}: grader" in profile([both], None).details["different_graders"][0]


def test_rows_that_were_graded_again_have_the_new_grader(two: list[Path], tmp_path: Path) -> None:
    again = tmp_path / "again.jsonl"
    grader = ["--env", "name=dataset", "--env", "grader=exact"]
    ran = python(*ROLLBOOK[1:], "data", "reverify", two[1], *grader, "-o", again)
    assert ran.returncode == 0, ran.stderr
    assert "different_graders" not in pairs([two[0], again], tmp_path / "p.jsonl").details
    assert len(read(tmp_path / "p.jsonl")) == 3


def test_a_collection_that_was_resumed_with_another_grader_is_mixed(tmp_path: Path) -> None:
    collected(tmp_path, "a", EXACT, ["2"], limit=1)
    output = collected(tmp_path, "a", NUMBER, ["2"], resume="always")
    assert (
        f"within {output}: grader: 'exact' -> 'number'"
        in profile([output], None).details["different_graders"]
    )


def test_a_diff_of_two_collections_shows_settings_and_environment_first(
    two: list[Path], tmp_path: Path
) -> None:
    ran = python(*ROLLBOOK[1:], "diff", *two)
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[1:3] == ["config:", "  agent.env.grader: 'exact' -> 'number'"]
    assert lines.index("metrics:") > 2
    assert read_manifest(two[0])["meaning"]["agent"]["env"]["grader"] == "exact"
