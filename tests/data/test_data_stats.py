"""`data stats`: the numbers are right, what is no number is counted, and both ways of reading agree."""

from __future__ import annotations

import gzip
import json
import math
import statistics
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.cli.main import main
from rollbook.data import stats as stats_module
from rollbook.data.job import DataJob
from rollbook.data.profile import profile
from rollbook.data.stats import FieldStats, stats
from rollbook.errors import BadLineError, UsageError
from rollbook.records.numbers import as_number
from rollout_rows import rollout


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return path


def rollouts(count: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(3)
    return [
        {
            "_rb_key": f"t{number // 4}#{number % 4}",
            "_ng_task_index": number // 4,
            "reward": float(rng.random()),
            "odd name": number,
            "response": {
                "id": "x",
                "usage": {"input_tokens": number, "output_tokens": int(rng.integers(9000))},
            },
            "stop_reason": "stop" if number % 10 else "length",
            "tags": [number, -number],
        }
        for number in range(count)
    ]


def by_name(fields: list[FieldStats]) -> dict[str, FieldStats]:
    return {one.field: one for one in fields}


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.zst", ".jsonl.gz", ".parquet"])
def test_numbers_of_every_format(tmp_path: Path, ending: str) -> None:
    rows = rollouts(400)
    source = write(tmp_path / "in.jsonl", rows)
    if ending != ".jsonl":
        with DataJob("copy", [source], tmp_path / f"copy{ending}") as job:
            for row in job.rows():
                job.write(row.data)
        source = tmp_path / f"copy{ending}"
    found = stats([source])
    assert (found.rows, found.tasks, found.rows_without_task) == (400, 100, 0)
    assert found.rows_per_task == {"min": 4, "mean": 4, "max": 4}
    assert found.stop_reasons == {"stop": 360, "length": 40}
    fields = by_name(found.fields)
    assert set(fields) == {
        "reward",
        '"odd name"',
        "response.usage.input_tokens",
        "response.usage.output_tokens",
    }
    rewards = [row["reward"] for row in rows]
    reward = fields["reward"]
    assert (reward.ok, reward.missing, reward.not_a_number) == (400, 0, 0)
    assert reward.mean == pytest.approx(statistics.fmean(rewards))
    assert reward.std == pytest.approx(statistics.stdev(rewards))
    assert (reward.min, reward.max) == (min(rewards), max(rewards))
    assert list(reward.quantiles.values()) == pytest.approx(
        np.quantile(rewards, [0.05, 0.25, 0.5, 0.75, 0.95])
    )
    assert fields['"odd name"'].mean == 199.5
    histogram = found.reward_histogram
    assert histogram is not None
    assert histogram.counts == np.histogram(rewards, bins=10, range=(0, 1))[0].tolist()


ODD = [
    '{"task_id": 1, "reward": 0.5}',
    '{"task_id": 1, "reward": NaN}',
    '{"task_id": 2, "reward": "0.75"}',
    '{"task_id": 2, "reward": true}',
    '{"task_id": 2, "reward": null}',
    '{"task_id": 2}',
    "",
    '{"task_id": "3", "reward": -2}',
    '{"task_id": "3", "reward": {"a": 1}}',
]


@pytest.mark.parametrize(
    "more", ["", '{"task_id": 4, "reward": 1, "reward": 1}\n', '{"task_id": 4, "reward": [1]}\n']
)
def test_what_is_no_number_is_counted_and_fails_nothing(tmp_path: Path, more: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(ODD) + "\n" + more)
    found = stats([source])
    (reward,) = found.fields
    rewards = [0.5, 1.0, -2.0] + [1.0] * ("reward" in more and "[1]" not in more)
    assert (found.rows, found.tasks) == (8 + bool(more), 3 + bool(more))
    assert reward.ok == len(rewards)
    assert reward.mean == pytest.approx(sum(rewards) / len(rewards))
    assert reward.ok + reward.missing + reward.not_a_number == found.rows


VALUES = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=3)


@settings(max_examples=15, deadline=None)
@given(values=st.lists(VALUES | st.lists(VALUES, max_size=2), min_size=1, max_size=12))
def test_numbers_are_those_of_the_one_rule(
    values: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    source = tmp_path_factory.mktemp("rule") / "in.jsonl"
    source.write_text("".join(json.dumps({"id": 1, "a b": {"c": [0, value]}}) + "\n" for value in values))
    (found,) = stats([source], fields=['"a b".c[-1]']).fields
    numbers = [as_number(value) for value in values]
    assert found.ok == sum(number is not None for number in numbers)
    assert found.missing == values.count(None)
    assert found.ok + found.missing + found.not_a_number == len(values)
    assert found.max == max((number for number in numbers if number is not None), default=None)


def test_rows_that_name_no_task_are_known_by_what_was_asked(tmp_path: Path) -> None:
    rows = [{"prompt": f"question {number % 3}", "reward": number} for number in range(9)]
    found = stats([write(tmp_path / "in.jsonl", rows)])
    assert (found.tasks, found.rows_without_task) == (3, 0)
    found = stats([write(tmp_path / "none.jsonl", [{"x": number} for number in range(9)])])
    assert (found.tasks, found.rows_without_task) == (0, 9)


def test_approximate_quantiles_are_near(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats_module, "_EXACT", 100)
    values = np.random.default_rng(5).lognormal(size=20_000)
    source = write(tmp_path / "in.jsonl", [{"id": n, "reward": v} for n, v in enumerate(values.tolist())])
    found = stats([source])
    assert found.quantiles == "approximate"
    ranks = [np.mean(values <= value) for value in found.fields[0].quantiles.values()]
    assert ranks == pytest.approx([0.05, 0.25, 0.5, 0.75, 0.95], abs=0.01)


def test_bad_lines_are_named(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", rollouts(300))
    good = source.read_bytes()
    for bad, message in (
        (b'{"reward": 1} {"reward": 2}\n', "not valid JSON"),
        (b"[1]\n", "not a JSON object"),
    ):
        source.write_bytes(good + bad + good)
        with pytest.raises(BadLineError, match=rf"in\.jsonl:301: {message}"):
            stats([source])


def test_names_with_glob_characters_and_quotes(tmp_path: Path) -> None:
    write(tmp_path / "a1.jsonl", rollouts(3))
    source = write(tmp_path / "a[1]'.jsonl", rollouts(8))
    assert stats([source]).rows == 8
    odd = 'row."it\'s ""so"""'
    found = stats([tmp_path / "a1.jsonl"], fields=[odd, "tags[-1]"])
    assert [(one.ok, one.missing) for one in found.fields] == [(0, 3), (3, 0)]
    assert found.fields[0].mean is None
    with pytest.raises(UsageError, match="not a field"):
        stats([source], fields=["reward + 1"])


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").touch()
    found = stats([tmp_path / "in.jsonl"])
    assert (found.rows, found.tasks, found.fields[0].ok) == (0, 0, 0)


def test_the_command_reports_coverage_and_failures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "r.jsonl", [*rollouts(20), {"_rb_key": "t9#0", "stop_reason": "\x1b[2Jhidden"}])
    write(tmp_path / "r_failures.ndjson", [{"_rb_key": "t7#1", "kind": "timeout"}] * 2)
    coverage = {"expected": 24, "ok": 21, "failed": 2, "missing": 3}
    manifest = {"rows": 6, "repeats": 4, "coverage": coverage}
    (tmp_path / "r_manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(SystemExit) as ended:
        main(["data", "stats", f"{tmp_path}/r*.jsonl", f"{tmp_path}/r*.ndjson"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "21 rows, 6 tasks (1 to 4 rows each, mean 3.5)" in printed
    assert "coverage: expected 24, ok 21, failed 2, missing 3" in printed
    assert "failures: 2 (timeout 2)" in printed
    assert "r_failures.ndjson: failures of r" in printed
    assert "\x1b" not in printed
    line = next(line for line in printed.splitlines() if line.startswith("reward "))
    assert line.split()[1:4] == ["20", "1", "0"]
    assert "[0.9, 1]" in printed
    with pytest.raises(SystemExit):
        main(["data", "stats", str(tmp_path / "r.jsonl"), "--field", "reward", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert [one["field"] for one in report["fields"]] == ["reward"]
    assert report["coverage"] == coverage
    assert math.isfinite(report["fields"][0]["mean"])
    assert msgspec.convert(report, stats_module.DataStats).rows == 21


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz"])
def test_numbers_are_found_wherever_they_first_occur(tmp_path: Path, ending: str) -> None:
    row = {
        "task_id": "t",
        "reward": 1,
        "null": None,
        "text": "a",
        "flag": True,
        "list": [1],
        "deep": {"a": 1},
    }
    late = {**row, "null": 2, "text": 3, "list": 4, 'odd "name"': 5, "response": {"usage": {"seconds": 6}}}
    later = {"task_id": "t", "response": {"usage": {"seconds": 7, "details": {}, "tokens": 8}}, "deep": 9}
    lines = [orjson.dumps(one) + b"\n" for one in [*[row] * 30_000, late, *[row] * 300, later]]
    source = tmp_path / f"in{ending}"
    source.write_bytes(gzip.compress(b"".join(lines)) if ending.endswith("gz") else b"".join(lines))
    found = {one.field: one.ok for one in stats([source]).fields if one.field != "reward"}
    assert found == {
        "null": 1,
        "text": 1,
        "flag": 30_301,
        "list": 1,
        '"odd ""name"""': 1,
        "deep": 1,
        "response.usage.seconds": 2,
        "response.usage.tokens": 1,
    }


def test_tasks_are_those_of_the_other_commands(tmp_path: Path) -> None:
    named = [{"task_id": str(number), "reward": 1} for number in range(300)]
    one = {"input": [{"role": "user", "content": "q"}], "temperature": 1}
    same = {"temperature": 1, "input": [{"content": "q", "role": "user"}]}
    unnamed = [{"responses_create_params": asked, "reward": 0} for asked in (one, same)]
    for rows in (named + unnamed, unnamed + named):
        source = write(tmp_path / "in.jsonl", rows)
        for fields in ((), ("reward",)):
            found = stats([source], fields=fields)
            assert (found.tasks, found.rows_without_task) == (301, 0)
        assert profile([source], None).details["tasks"] == 301


def test_what_a_grader_says_with_true_and_false_is_a_number_too(tmp_path: Path) -> None:
    rows = [rollout("a", repeat, 1.0, correct=repeat > 0, _rb_metrics=["correct"]) for repeat in range(4)]
    found = by_name(stats([write(tmp_path / "r.jsonl", rows)]).fields)["correct"]
    assert (found.ok, found.missing, found.mean) == (4, 0, 0.75)
    values = [0.0, 1.0, 1.0, 1.0]
    assert found.std == pytest.approx(statistics.stdev(values))
    assert found.std_error == pytest.approx(statistics.stdev(values) / 2)


def test_one_value_has_no_standard_error(tmp_path: Path) -> None:
    found = by_name(stats([write(tmp_path / "r.jsonl", [rollout("a", 0, 1.0)])]).fields)["reward"]
    assert (found.mean, found.std, found.std_error) == (1.0, None, None)
