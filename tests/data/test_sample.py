"""A sample is uniform, without replacement, reproducible, and in the order of the input."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollbook.cli.main import main
from rollbook.data.sample import sample
from rollbook.errors import BadLineError, UsageError
from rollbook.records.rows import read_rows


def write_tasks(path: Path, tasks: int, repeats: int = 1) -> Path:
    """Repeats stand apart from each other, as collections leave them."""
    rows = [{"_rb_key": f"t{task}#{repeat}"} for repeat in range(repeats) for task in range(tasks)]
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return path


def keys(path: Path) -> list[str]:
    return [row.value()["_rb_key"] for row in read_rows(path)]


def test_a_number_and_a_fraction(tmp_path: Path) -> None:
    source = write_tasks(tmp_path / "in.jsonl", 1000)
    everything = keys(source)
    for size, count in (({"count": 100}, 100), ({"fraction": 0.25}, 250), ({"fraction": 1.0}, 1000)):
        manifest = sample([source], tmp_path / "out.jsonl", **size, overwrite=True)
        taken = keys(tmp_path / "out.jsonl")
        assert len(taken) == len(set(taken)) == count == manifest.rows_out
        assert taken == [key for key in everything if key in set(taken)]  # in the order of the input
        assert manifest.rows_in == 1000


def test_seeds(tmp_path: Path) -> None:
    source = write_tasks(tmp_path / "in.jsonl", 100)
    made = []
    for seed in (1, 1, 2):
        sample([source], tmp_path / "out.jsonl", count=10, seed=seed, overwrite=True)
        made.append((tmp_path / "out.jsonl").read_bytes())
    assert made[0] == made[1] != made[2]


def test_shuffle_is_the_same_rows_in_another_order(tmp_path: Path) -> None:
    source = write_tasks(tmp_path / "in.jsonl", 100)
    sample([source], tmp_path / "in_order.jsonl", count=50, seed=1)
    sample([source], tmp_path / "shuffled.jsonl", count=50, seed=1, shuffle=True)
    assert keys(tmp_path / "in_order.jsonl") != keys(tmp_path / "shuffled.jsonl")
    assert sorted(keys(tmp_path / "in_order.jsonl")) == sorted(keys(tmp_path / "shuffled.jsonl"))


def test_every_order_of_a_shuffle_is_as_likely(tmp_path: Path) -> None:
    source = write_tasks(tmp_path / "in.jsonl", 3)
    orders: Counter[tuple[str, ...]] = Counter()
    for seed in range(120):
        sample([source], tmp_path / "out.jsonl", fraction=1, seed=seed, shuffle=True, overwrite=True)
        orders[tuple(keys(tmp_path / "out.jsonl"))] += 1
    counts = [orders[order] for order in itertools.permutations(keys(source))]
    # The quantile of chi-square at 1 - 1e-6 for 5 degrees of freedom.
    assert sum((count - 20) ** 2 / 20 for count in counts) < 36.0


def test_whole_tasks(tmp_path: Path) -> None:
    source = write_tasks(tmp_path / "in.jsonl", 50, repeats=4)
    manifest = sample([source], tmp_path / "out.jsonl", count=10, by_task=True)
    times = Counter(key.partition("#")[0] for key in keys(tmp_path / "out.jsonl"))
    assert len(times) == 10
    assert set(times.values()) == {4}
    assert manifest.counts == {"tasks_in": 50, "tasks_out": 10}
    assert (manifest.rows_in, manifest.rows_out) == (200, 40)


def test_tasks_are_sampled_uniformly(tmp_path: Path) -> None:
    source = write_tasks(tmp_path / "in.jsonl", 10, repeats=2)
    times: Counter[str] = Counter()
    for seed in range(50):
        sample([source], tmp_path / "out.jsonl", count=3, by_task=True, seed=seed, overwrite=True)
        times.update(keys(tmp_path / "out.jsonl"))
    # The quantile of chi-square at 1 - 1e-6 for 9 degrees of freedom.
    assert sum((times[f"t{task}#0"] - 15) ** 2 / 15 for task in range(10)) < 45.0


@pytest.mark.parametrize("ending", [".jsonl.zst", ".parquet"])
def test_formats(tmp_path: Path, ending: str) -> None:
    source = write_tasks(tmp_path / "in.jsonl", 30, repeats=2)
    sample([source], tmp_path / f"packed{ending}", fraction=1)
    for by_task in (False, True):
        sample([source], tmp_path / "a.jsonl", count=5, by_task=by_task, overwrite=True)
        sample([tmp_path / f"packed{ending}"], tmp_path / "b.jsonl", count=5, by_task=by_task, overwrite=True)
        assert keys(tmp_path / "a.jsonl") == keys(tmp_path / "b.jsonl")


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ({}, "say how much to take"),
        ({"count": 3, "fraction": 0.5}, "say how much to take"),
        ({"count": 0}, "-n 0: at least 1"),
        ({"fraction": 1.5}, "--fraction 1.5: more than 0 and at most 1"),
        ({"fraction": 0.0}, "--fraction 0: more than 0"),
        ({"count": 11}, "-n 11: there are only 10 rows"),
        ({"count": 11, "by_task": True}, "-n 11: there are only 5 tasks"),
    ],
)
def test_sizes_that_make_no_sense(tmp_path: Path, size: dict[str, Any], message: str) -> None:
    source = write_tasks(tmp_path / "in.jsonl", 5, repeats=2)
    with pytest.raises(UsageError, match=message):
        sample([source], tmp_path / "out.jsonl", **size)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b'{"id":1}\n{"id":2\n')
    for by_task in (False, True):
        with pytest.raises(BadLineError, match=r"in\.jsonl:2: not valid JSON"):
            sample([tmp_path / "in.jsonl"], tmp_path / "out.jsonl", fraction=1, by_task=by_task)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_tasks(tmp_path / "in.jsonl", 50, repeats=2)
    with pytest.raises(SystemExit) as ended:
        main(["data", "sample", str(source), "-n", "7", "--json", "-o", str(tmp_path / "out.jsonl")])
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)["rows_out"] == 7
    with pytest.raises(SystemExit) as ended:
        main(["data", "sample", str(source), "-o", str(tmp_path / "other.jsonl")])
    assert ended.value.code == 2
    assert "say how much to take" in capsys.readouterr().err
