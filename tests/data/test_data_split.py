"""`data split`: no task in two parts, shares exact over tasks, nothing lost, the same seed the same bytes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.cli.main import main
from rollbook.data.split import split
from rollbook.errors import BadLineError, UsageError, WriteError
from rollbook.records.identity import task_id
from rollbook.records.rows import read_rows


def rollouts(tasks: int, repeats: int) -> list[dict[str, Any]]:
    """Repeats far apart, as a collector writes them."""
    return [
        {"_rb_key": f"t{task}#{repeat}", "kind": f"k{task % 7}", "reward": task / tasks}
        for repeat in range(repeats)
        for task in range(tasks)
    ]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return path


def parts_of(directory: Path, *names: str) -> list[list[dict[str, Any]]]:
    return [[row.value() for row in read_rows(directory / name)] for name in names]


def test_shares_are_exact_over_tasks_and_repeats_stay_together(tmp_path: Path) -> None:
    rows = rollouts(101, 4)
    source = write(tmp_path / "all.jsonl", rows)
    manifest = split([source], {"train": 0.7, "val.jsonl.zst": 0.2, "test": 0.1}, tmp_path / "out", seed=7)
    parts = parts_of(tmp_path / "out", "train.jsonl", "val.jsonl.zst", "test.jsonl")
    tasks = [{task_id(row) for row in part} for part in parts]
    assert [len(part) for part in tasks] == [71, 20, 10]
    assert len(set.union(*tasks)) == 101
    assert [len(part) for part in parts] == [284, 80, 40]
    assert manifest.details["train"] == {"share": 0.7, "tasks": 71, "rows": 284}
    for part in parts:  # the order of the input
        assert part == [row for row in rows if row in part]
    beside = json.loads((tmp_path / "out" / "test_manifest.json").read_text())
    assert (beside["rows_in"], beside["rows_out"], beside["seed"]) == (404, 40, 7)


def test_a_task_stays_in_its_part_whatever_the_order_of_rows(tmp_path: Path) -> None:
    rows = rollouts(50, 2)
    split([write(tmp_path / "a.jsonl", rows)], {"x": 0.5, "y": 0.5}, tmp_path / "a", seed=3)
    split([write(tmp_path / "b.jsonl", rows[::-1])], {"x": 0.5, "y": 0.5}, tmp_path / "b", seed=3)
    split([tmp_path / "a.jsonl"], {"x": 0.5, "y": 0.5}, tmp_path / "c", seed=3)
    split([tmp_path / "a.jsonl"], {"x": 0.5, "y": 0.5}, tmp_path / "d", seed=4)
    tasks = {name: {task_id(row) for row in parts_of(tmp_path / name, "x.jsonl")[0]} for name in "abd"}
    assert tasks["a"] == tasks["b"] != tasks["d"]
    assert (tmp_path / "a/x.jsonl").read_bytes() == (tmp_path / "c/x.jsonl").read_bytes()


def test_every_task_is_as_likely_as_any_other(tmp_path: Path) -> None:
    source = write(tmp_path / "all.jsonl", rollouts(20, 1))
    drawn: Counter[str] = Counter()
    for seed in range(40):
        split([source], {"a": 0.25, "b": 0.75}, tmp_path / "out", seed=seed, overwrite=True)
        drawn.update(task_id(row) for row in parts_of(tmp_path / "out", "a.jsonl")[0])
    assert sum(drawn.values()) == 200
    chi_square = sum((drawn[f"t{task}"] - 10) ** 2 / (10 * 0.75) for task in range(20)) * 19 / 20
    assert chi_square < 43.8  # the 99.9 % point of 19 degrees of freedom; the seeds are fixed


@settings(max_examples=30, deadline=None)
@given(
    tasks=st.lists(st.integers(0, 12), min_size=20, max_size=60).filter(lambda drawn: len(set(drawn)) > 4),
    seed=st.integers(0, 10**12),
)
def test_nothing_straddles_and_nothing_is_lost(
    tasks: list[int], seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("split")
    rows = [{"task_id": task, "n": number} for number, task in enumerate(tasks)]
    split([write(directory / "all.jsonl", rows)], {"a": 0.6, "b": 0.4}, directory, seed=seed)
    first, second = parts_of(directory, "a.jsonl", "b.jsonl")
    assert not {row["task_id"] for row in first} & {row["task_id"] for row in second}
    assert sorted(row["n"] for row in first + second) == list(range(len(rows)))
    assert abs(len({row["task_id"] for row in first}) - 0.6 * len(set(tasks))) < 1


def test_by_field_and_by_row(tmp_path: Path) -> None:
    source = write(tmp_path / "all.jsonl", rollouts(70, 2))
    split([source], {"a": 0.5, "b": 0.5}, tmp_path / "field", by="kind")
    first, second = parts_of(tmp_path / "field", "a.jsonl", "b.jsonl")
    assert not {row["kind"] for row in first} & {row["kind"] for row in second}
    split([source], {"a": 0.3, "b": 0.7}, tmp_path / "row", by="row")
    assert len(parts_of(tmp_path / "row", "a.jsonl")[0]) == 42
    with pytest.raises(BadLineError, match=r"all\.jsonl:1: no absent, which the split is by"):
        split([source], {"a": 0.5, "b": 0.5}, tmp_path / "x", by="absent")


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ({"a": 0.5, "b": 0.4}, "add up to 0.9"),
        ({"a": 1.0}, "two parts"),
        ({"a": 1.5, "b": -0.5}, "between 0 and 1"),
        ({"a/b": 0.5, "b": 0.5}, "no name of a part"),
        ({"a": 0.99, "b": 0.01}, "b=0.01 of 10 tasks is none"),
        ({"a": 0.5, "a.jsonl": 0.5}, "names of their own"),
    ],
)
def test_refusals_leave_nothing(tmp_path: Path, shares: dict[str, float], message: str) -> None:
    source = write(tmp_path / "all.jsonl", rollouts(10, 1))
    with pytest.raises(UsageError, match=message):
        split([source], shares, tmp_path / "out")
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path != source]


def test_nothing_to_split_and_no_directory_to_write_to(tmp_path: Path) -> None:
    halves = {"a": 0.5, "b": 0.5}
    with pytest.raises(UsageError, match="no rows to split"):
        split([write(tmp_path / "none.jsonl", [])], halves, tmp_path / "out")
    source = write(tmp_path / "all.jsonl", rollouts(10, 1))
    with pytest.raises(WriteError, match=r"all\.jsonl/a\.jsonl: cannot write here"):
        split([source], halves, source)


def test_one_part_that_is_there_keeps_all_from_being_written(tmp_path: Path) -> None:
    source = write(tmp_path / "all.jsonl", rollouts(10, 1))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "val.jsonl").write_text("precious")
    with pytest.raises(UsageError, match="exists"):
        split([source], {"train": 0.5, "val": 0.5}, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["val.jsonl"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "all.jsonl", rollouts(20, 3))
    command = ["data", "split", str(source), "train=0.9", "val=0.1", "--seed", "7", "-o", str(tmp_path / "d")]
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 0
    assert "  val: share 0.1, tasks 2, rows 6" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main([*command, "--json", "--overwrite"])
    assert json.loads(capsys.readouterr().out)["details"]["train"]["rows"] == 54
