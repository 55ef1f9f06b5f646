"""What a path means: the same rows to every command, and nothing that would count twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollbook.data.filter import filter_rows
from rollbook.data.stats import stats
from rollbook.errors import UsageError
from rollbook.query.session import Session
from rollbook.runs.resolve import find_inputs, find_sources
from rollout_rows import rollout, write_rows

ROWS = [rollout("a", 0, 1.0), rollout("b", 0, 0.0)]


def count(*things: Path | str) -> int:
    """How many rows these are to a query and to a command over datasets, which must agree."""
    [[(queried,)]] = Session(things).run("select count(*) from rollouts").batches
    assert stats(things, fields=["reward"]).rows == queried
    return int(queried)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two rows, and one of them again in a dataset that was made from them."""
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "roll.jsonl", ROWS)
    filter_rows(["roll.jsonl"], Path("roll_good.jsonl"), where="reward > 0.5")
    return tmp_path


def test_a_directory_means_the_same_rows_to_every_command(made: Path) -> None:
    for spelling in (made, ".", f"{made}/*.jsonl", "roll*.jsonl"):
        assert count(spelling) == 2
        (skipped,) = find_sources([spelling]).skipped
        assert skipped.path.name == "roll_good.jsonl"
        assert skipped.why.startswith("made from") and "name it to include it" in skipped.why
    assert count("roll.jsonl", "roll_good.jsonl") == count(made, "roll_good.jsonl") == 3
    assert find_sources([made, made / "roll_good.jsonl"]).skipped == []
    (made / "roll.jsonl").unlink()
    assert count(made) == 1


def test_what_is_read_elsewhere_is_not_counted_again(made: Path) -> None:
    filter_rows(["roll.jsonl"], Path("sub/again.jsonl"), where="reward > 0.5")
    assert count(made) == count("roll.jsonl", "sub") == 2
    assert count("sub") == 1


def test_a_dataset_is_not_left_out_because_of_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        write_rows(tmp_path / name / "in.jsonl", ROWS)
    monkeypatch.chdir(tmp_path / "y")
    filter_rows(["../x/in.jsonl"], Path("good.jsonl"), where="reward > 0.5")
    for directory in (tmp_path, tmp_path / "x"):
        monkeypatch.chdir(directory)
        assert [path.name for path in find_inputs([tmp_path / "y"]).paths] == ["good.jsonl", "in.jsonl"]


def test_a_dataset_that_was_moved_with_its_input_is_known(made: Path) -> None:
    (made / "moved").mkdir()
    for path in list(made.glob("roll*")):
        path.rename(made / "moved" / path.name)
    assert count(made / "moved") == 2


def test_the_files_of_a_collection_are_no_rows_of_it(tmp_path: Path) -> None:
    for name in ("out.jsonl", "out_tasks.ndjson", "out_failures.ndjson", "tasks.jsonl"):
        write_rows(tmp_path / name, ROWS)
    manifest = {"meaning": {}, "input": "tasks.jsonl"}
    (tmp_path / "out_manifest.json").write_text(json.dumps(manifest))
    assert count(tmp_path) == count(f"{tmp_path}/*.jsonl") == count(tmp_path / "out.jsonl") == 2
    # A shell names the files of its pattern one by one; failures and tasks are no rows even so.
    assert count(*sorted(tmp_path.glob("out*.jsonl"))) == 2
    assert count(tmp_path, tmp_path / "tasks.jsonl") == 4
    why = {skipped.path.name: skipped.why for skipped in find_inputs([tmp_path]).skipped}
    assert why["out_failures.ndjson"] == "failures of out" and why["tasks.jsonl"].startswith("tasks of")
    assert find_inputs([tmp_path / "out_failures.ndjson"]).paths == [tmp_path / "out_failures.ndjson"]


def test_inputs_are_files_directories_and_patterns(tmp_path: Path) -> None:
    names = ("b.jsonl", "a.jsonl", "c.parquet", ".hidden.jsonl", "notes.txt")
    before = ("a_failures.jsonl", "a_tasks.jsonl")  # as collections named them before 0.2
    for name in (*names, *before, "a_failures.ndjson", "a_tasks.ndjson"):
        (tmp_path / name).touch()
    assert [path.name for path in find_inputs([tmp_path]).paths] == ["a.jsonl", "b.jsonl", "c.parquet"]
    found = find_inputs([f"{tmp_path}/a*.jsonl"])
    assert [path.name for path in found.paths] == ["a.jsonl"]
    assert sorted(skipped.path.name for skipped in found.skipped) == list(before)
    twice = find_inputs([tmp_path / "a.jsonl", tmp_path / "." / ".." / tmp_path.name / "a.jsonl"])
    assert len(twice.paths) == 1
    for word, message in (("nothing*.jsonl", "no such file"), ("notes.txt", "neither a file of a run")):
        with pytest.raises(UsageError, match=message):
            find_inputs([tmp_path / word])


def test_a_run_holds_no_rows_of_a_dataset(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    write_rows(tmp_path / "own_log.jsonl", ROWS)
    assert [file.path.name for file in find_sources([tmp_path]).files] == ["metrics.jsonl"]
    with pytest.raises(UsageError, match="a run, and no rows"):
        find_inputs([tmp_path])
    assert len(find_inputs([tmp_path / "own_log.jsonl"]).paths) == 1
