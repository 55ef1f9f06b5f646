"""Per task: pass rates, pass@k against the closed form, and a curriculum by band."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.cli.main import main
from rollbook.data.profile import Band, pass_at_k, profile
from rollbook.data.rl import rl
from rollbook.errors import UsageError
from rollbook.records.identity import content_id, task_id
from rollout_rows import read, rollout, write_rows


@settings(max_examples=60, deadline=None)
@given(rollouts=st.integers(1, 9), data=st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(rollouts: int, data: st.DataObject) -> None:
    passed = data.draw(st.integers(0, rollouts))
    k = data.draw(st.integers(1, rollouts))
    outcomes = [True] * passed + [False] * (rollouts - passed)
    subsets = [any(subset) for subset in itertools.combinations(outcomes, k)]
    assert pass_at_k(rollouts, passed, k) == pytest.approx(sum(subsets) / len(subsets))


def test_too_few_rollouts_say_nothing_about_k() -> None:
    assert pass_at_k(3, 3, 4) is None


def test_profile_of_scattered_repeats(tmp_path: Path) -> None:
    rows = [rollout("a", 0, 1.0), rollout("b", 0, 0.0), rollout("a", 1, 0.0), rollout("b", 1, 0.0)]
    rows += [rollout("a", 2, 1.0), rollout("c", 0, None), rollout("a", 3, 0.5, stop_reason="length")]
    source = write_rows(tmp_path / "r.jsonl", rows)
    manifest = profile([source], tmp_path / "p.jsonl")
    first, second, third = read(tmp_path / "p.jsonl")
    assert [first["task_id"], second["task_id"], third["task_id"]] == ["a", "b", "c"]
    assert first["pass_rate"] == 0.5
    assert first["pass@2"] == pytest.approx(1 - 1 / 6)
    assert first["mean/reward"] == pytest.approx(0.625)
    assert first["num_truncated"] == 1
    assert second["pass@4"] is None
    assert third["pass_rate"] is None and third["num_rewards"] == 0
    assert third["missing_num_rollouts"] == 3
    assert first["sample"]["expected_answer"] == "4" and "response" not in first["sample"]
    assert manifest.coverage == {"ok": 6, "without_reward": 1}  # nothing says what was expected
    assert manifest.details["pass_at_k"]["4"]["tasks"] == 1


def test_the_order_of_rows_changes_no_number(tmp_path: Path) -> None:
    source = random.Random(3)
    rows = [
        rollout(f"t{task}", repeat, source.choice([0.0, 0.5, 1.0]))
        for task in range(30)
        for repeat in range(5)
    ]
    shuffled = source.sample(rows, len(rows))
    for name, some in (("a", rows), ("b", shuffled)):
        profile([write_rows(tmp_path / f"{name}.jsonl", some)], tmp_path / f"{name}_profile.jsonl")
    sides = [{line["task_id"]: line for line in read(tmp_path / f"{name}_profile.jsonl")} for name in "ab"]
    for task, line in sides[0].items():
        other = sides[1][task]
        del line["sample"], other["sample"]
        assert line == pytest.approx(other), task
    assert len(sides[0]) == len(sides[1]) == 30


def test_a_band_is_a_curriculum(tmp_path: Path) -> None:
    rows = [
        rollout(task, repeat, float(repeat < passes))
        for task, passes in (("easy", 4), ("mid", 2), ("hard", 0))
        for repeat in range(4)
    ]
    source = write_rows(tmp_path / "r.jsonl", rows)
    tasks = write_rows(
        tmp_path / "tasks.jsonl",
        [{"id": name, "question": f"Do {name}."} for name in ("hard", "mid", "easy", "new")],
    )
    manifest = rl([source], tmp_path / "rl.jsonl", tasks=tasks, band=Band.parse("0.1..0.9"))
    assert read(tmp_path / "rl.jsonl") == [
        {
            "id": "mid",
            "question": "Do mid.",
            "task_id": "mid",
            "pass_rate": 0.5,
            "num_rollouts": 4,
            "mean_reward": 0.5,
            "std_reward": pytest.approx(0.57735, abs=1e-4),
        }
    ]
    assert manifest.counts == {"tasks_outside_band": 2, "tasks_without_rollouts": 1}
    rl([source], tmp_path / "own.jsonl")
    assert [row["pass_rate"] for row in read(tmp_path / "own.jsonl")] == [1.0, 0.5, 0.0]
    assert all(
        "response" not in row and row["responses_create_params"] for row in read(tmp_path / "own.jsonl")
    )
    with pytest.raises(UsageError, match=r"3 tasks of the rollouts are not in .*other.jsonl"):
        rl([source], tmp_path / "no.jsonl", tasks=write_rows(tmp_path / "other.jsonl", [{"id": "x"}]))
    assert not (tmp_path / "no.jsonl").exists()


def test_pass_rates_go_to_the_tasks_by_what_they_show(tmp_path: Path) -> None:
    """Whatever the index in another file."""
    asked = {"easy": [{"role": "user", "content": "easy", "type": "message"}], "hard": "hard"}
    rows = [
        {
            "_ng_task_index": index,
            "_ng_rollout_index": 0,
            "reward": reward,
            "responses_create_params": {"input": asked[name], "tools": []},
        }
        for index, name, reward in ((1, "easy", 1), (0, "hard", 0))
    ]
    tasks = [{"_ng_task_index": 1, "question": "hard"}, {"_ng_task_index": 0, "question": "easy"}]
    listed = write_rows(tmp_path / "tasks.jsonl", tasks)
    rl([write_rows(tmp_path / "r.jsonl", rows)], tmp_path / "rl.jsonl", tasks=listed)
    made = {row["question"]: row["pass_rate"] for row in read(tmp_path / "rl.jsonl")}
    assert made == {"hard": 0.0, "easy": 1.0}


def test_tasks_that_say_the_same_have_their_own_pass_rates(tmp_path: Path) -> None:
    task = {"responses_create_params": {"input": "1 + 1?"}}
    name = content_id(task)
    rows = [rollout(f"{name}{end}", 0, reward) for end, reward in (("", 1.0), ("~2", 0.0))]
    listed = write_rows(tmp_path / "tasks.jsonl", [task, task])
    rl([write_rows(tmp_path / "r.jsonl", rows)], tmp_path / "rl.jsonl", tasks=listed)
    assert [row["pass_rate"] for row in read(tmp_path / "rl.jsonl")] == [1.0, 0.0]


def test_one_task_under_two_names_is_refused(tmp_path: Path) -> None:
    unnamed = {"reward": 0.0, "prompt": "Do a."}
    rows = [rollout("a", 0, 1.0), unnamed]
    listed = write_rows(tmp_path / "tasks.jsonl", [{"id": "a", "question": "Do a."}])
    with pytest.raises(UsageError, match=f"a and {task_id(unnamed)} of the rollouts are the same task"):
        rl([write_rows(tmp_path / "r.jsonl", rows)], tmp_path / "rl.jsonl", tasks=listed)


@pytest.mark.parametrize("text", ["5", "0.5", "0.9..0.1", "a..b", "-1..1"])
def test_bands_are_checked(text: str) -> None:
    with pytest.raises(UsageError, match=r"0\.1\.\.0\.9"):
        Band.parse(text)


def test_profile_by_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_rows(tmp_path / "r.jsonl", [rollout("a", 0, 1.0), rollout("a", 1, 0.0)])
    with pytest.raises(SystemExit) as ended:
        main(["data", "profile", str(source), "--json"])
    assert ended.value.code == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["details"]["pass_at_k"]["1"] == {"mean": 0.5, "std_error": None, "tasks": 1}
    with pytest.raises(SystemExit):
        main(["data", "profile", str(source), "-o", str(tmp_path / "p.parquet")])
    assert "pass@2" in capsys.readouterr().out
    assert (tmp_path / "p.parquet").exists() and (tmp_path / "p_manifest.json").exists()


def test_what_was_planned_and_never_came_is_said(tmp_path: Path) -> None:
    source = write_rows(
        tmp_path / "out.jsonl", [rollout("a", 0, 1.0), rollout("a", 1, 0.0), rollout("b", 0, 1.0)]
    )
    planned = {"rows": 3, "repeats": 2, "input_sha256": "x", "coverage": {"failed": 2}}
    (tmp_path / "out_manifest.json").write_text(json.dumps(planned))
    manifest = profile([source], None)
    assert manifest.coverage == {"expected": 6, "ok": 3, "failed": 2, "missing": 3, "without_reward": 0}
    assert manifest.details["tasks_without_rollouts"] == 1


def test_whole_numbers_past_64_bits_keep_their_digits(tmp_path: Path) -> None:
    big = "123456789012345678901234567890"
    row = json.dumps(rollout("a", 0, 1.0, seed=int(big)))
    (tmp_path / "r.jsonl").write_text(f"{row}\n")
    (tmp_path / "tasks.jsonl").write_text(f'{{"id": "a", "seed": {big}}}\n')
    profile([tmp_path / "r.jsonl"], tmp_path / "p.jsonl")
    rl([tmp_path / "r.jsonl"], tmp_path / "own.jsonl")
    rl([tmp_path / "r.jsonl"], tmp_path / "listed.jsonl", tasks=tmp_path / "tasks.jsonl")
    for name in ("p", "own", "listed"):
        assert f": {big}" in (tmp_path / f"{name}.jsonl").read_text().replace('":', '": ')


def test_a_task_is_expected_as_often_as_its_manifest_says(tmp_path: Path) -> None:
    for name, repeats in (("a", 2), ("b", 4)):
        rows = [rollout(name, repeat, 1.0) for repeat in range(2)]
        write_rows(tmp_path / f"{name}.jsonl", rows)
        plan = {"rows": 1, "repeats": repeats, "input_sha256": name}
        (tmp_path / f"{name}_manifest.json").write_text(json.dumps(plan))
    sources = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    profile(sources, tmp_path / "p.jsonl")
    found = [
        (line["expected_num_rollouts"], line["missing_num_rollouts"]) for line in read(tmp_path / "p.jsonl")
    ]
    assert found == [(2, 0), (4, 2)]
    (tmp_path / "b_manifest.json").unlink()  # as many as any task has, where nothing says it
    write_rows(tmp_path / "b.jsonl", [rollout("b", repeat, 1.0) for repeat in range(3)])
    profile(sources, tmp_path / "p.jsonl", overwrite=True)
    assert [line["expected_num_rollouts"] for line in read(tmp_path / "p.jsonl")] == [2, 3]
