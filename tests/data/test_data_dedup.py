"""`data dedup`: the first of its like stays, exact and near, and every other row is accounted for."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.cli.main import main
from rollbook.data.dedup import dedup
from rollbook.data.near_duplicates import NearDuplicates, bands_for, runs_of
from rollbook.errors import UsageError
from rollbook.records.rows import read_rows


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return path


def values(path: Path) -> list[dict[str, Any]]:
    return [row.value() for row in read_rows(path)]


def rollout(task: int, repeat: int, answer: str) -> dict[str, Any]:
    item = {"type": "message", "id": f"msg_{task}_{repeat}", "role": "assistant"}
    return {
        "_rb_key": f"t{task}#{repeat}",
        "_ng_task_index": task,
        "_ng_rollout_index": repeat,
        "reward": 1.0,
        "responses_create_params": {"input": [{"role": "user", "content": f"question {task % 3}"}]},
        "response": {
            "id": f"resp_{task}_{repeat}",
            "created_at": 1000.0 + repeat,
            "output": [{**item, "content": [{"type": "output_text", "text": answer}]}],
        },
    }


def test_bookkeeping_does_not_tell_rows_apart(tmp_path: Path) -> None:
    rows = [
        rollout(0, 0, "4"),
        rollout(0, 1, "4"),
        rollout(0, 2, "5"),
        rollout(3, 0, "4"),
        rollout(1, 0, "4"),
    ]
    reordered = dict(reversed(rows[2].items()))
    source = write(tmp_path / "in.jsonl", [*rows, reordered])
    manifest = dedup([source], tmp_path / "out.jsonl", rejected=tmp_path / "again.jsonl")
    assert values(tmp_path / "out.jsonl") == [rows[0], rows[2], rows[4]]
    again = values(tmp_path / "again.jsonl")
    assert [row["_rb_repeats"] for row in again] == ["t0#0", "t0#0", "t0#2"]
    assert {k: v for k, v in again[0].items() if k != "_rb_repeats"} == rows[1]
    assert manifest.counts == {"repeated": 3}
    assert manifest.rows_in == manifest.rows_out + 3
    assert manifest.details == {"clusters": 2, "largest_cluster": 3, "cluster_sizes": {"2": 1, "3": 1}}


@pytest.mark.parametrize(
    ("on", "kept"),
    [("task", [0, 2, 3, 4]), ("prompt", [0, 3, 4]), ("reward", [0]), ("absent.field", [0, 1, 2, 3, 4])],
)
def test_what_is_compared(tmp_path: Path, on: str, kept: list[int]) -> None:
    rows = [
        rollout(0, 0, "a"),
        rollout(0, 1, "b"),
        rollout(3, 0, "c"),
        rollout(1, 0, "d"),
        rollout(2, 0, "e"),
    ]
    manifest = dedup([write(tmp_path / "in.jsonl", rows)], tmp_path / "out.jsonl", on=on)
    assert values(tmp_path / "out.jsonl") == [rows[number] for number in kept]
    assert manifest.counts.get("nothing_to_compare", 0) == (5 if on == "absent.field" else 0)


def test_rows_without_a_key_are_named_by_their_place(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [{"a": 1}, {"a": 2}, {"a": 1}])
    dedup([source], tmp_path / "out.jsonl", rejected=tmp_path / "again.jsonl")
    assert values(tmp_path / "again.jsonl") == [{"a": 1, "_rb_repeats": f"{source}:1"}]


@settings(max_examples=40, deadline=None)
@given(numbers=st.lists(st.integers(0, 8), max_size=40))
def test_exact_is_what_a_dictionary_says(
    numbers: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("dedup")
    rows = [{"_rb_key": f"t{place}#0", "n": number} for place, number in enumerate(numbers)]
    dedup([write(directory / "in.jsonl", rows)], directory / "out.jsonl")
    firsts = {row["n"]: row for row in reversed(rows)}
    expected = sorted(firsts.values(), key=lambda row: int(row["_rb_key"][1:-2]))
    assert values(directory / "out.jsonl") == expected


def pair(rng: random.Random, similarity: float) -> tuple[str, str]:
    """Two texts whose sets of five-word runs have this Jaccard index: one is the other with a new end."""
    runs = 300
    shared = round(2 * runs * similarity / (1 + similarity))
    start = [f"w{rng.getrandbits(50)}" for _ in range(shared + 4)]
    ends = [[f"w{rng.getrandbits(50)}" for _ in range(runs - shared)] for _ in range(2)]
    return " ".join(start + ends[0]), " ".join(start + ends[1])


@pytest.mark.parametrize(
    ("similarity", "least", "most"), [(0.95, 98, 100), (0.9, 96, 100), (0.7, 0, 4), (0.5, 0, 0)]
)
def test_near_pairs_are_found_above_the_threshold_and_not_below(
    similarity: float, least: int, most: int
) -> None:
    rng = random.Random(5)
    near = NearDuplicates(0.8)
    for _ in range(100):
        one, two = pair(rng, similarity)
        exact = len(runs_of(one) & runs_of(two)) / len(runs_of(one) | runs_of(two))
        assert exact == pytest.approx(similarity, abs=0.005)
        near.add(one)
        near.add(two)
    first = near.first
    found = [first[number + 1] for number in range(0, 200, 2) if first[number + 1] != number + 1]
    assert least <= len(found) <= most
    assert all(first[number] == number for number in range(0, 200, 2))


@pytest.mark.parametrize("similarity", [0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99])
def test_the_index_misses_few_at_the_threshold(similarity: float) -> None:
    bands = bands_for(similarity)
    assert 128 % bands == 0
    assert (1 - similarity ** (128 // bands)) ** bands <= 0.01


def test_near_rows_point_to_the_first_and_texts_without_words_stay(tmp_path: Path) -> None:
    text = " ".join(f"word{number}" for number in range(200))
    answers = [
        text,
        text.upper() + "!",
        "",
        "",
        text.replace("word199", "end"),
        "short",
        "short",
        "数学の問題です",
    ]
    rows = [rollout(0, number, answer) for number, answer in enumerate(answers)]
    for number, row in enumerate(rows):
        row["responses_create_params"] = {}
        row["reward"] = number
    source = write(tmp_path / "in.jsonl", rows)
    manifest = dedup([source], tmp_path / "out.jsonl", near=0.8, rejected=tmp_path / "again.jsonl")
    assert [row["reward"] for row in values(tmp_path / "out.jsonl")] == [0, 2, 3, 5, 7]
    assert [row["_rb_repeats"] for row in values(tmp_path / "again.jsonl")] == ["t0#0", "t0#0", "t0#5"]
    assert manifest.counts == {"repeated": 3, "nothing_to_compare": 2}
    with pytest.raises(UsageError, match="a similarity from"):
        dedup([source], tmp_path / "x.jsonl", near=0.2)


def test_near_texts_of_chat_and_fields(tmp_path: Path) -> None:
    text = " ".join(f"word{number}" for number in range(100))
    rows = [{"messages": [{"role": "user", "content": text + end}], "n": end} for end in (" a", " b", " c")]
    source = write(
        tmp_path / "in.jsonl", [*rows, {"messages": [{"role": "user", "content": "other"}], "n": " d"}]
    )
    dedup([source], tmp_path / "out.jsonl", near=0.8)
    assert [row["n"] for row in values(tmp_path / "out.jsonl")] == [" a", " d"]
    dedup([source], tmp_path / "field.jsonl", near=0.8, on="messages[0].content")
    assert [row["n"] for row in values(tmp_path / "field.jsonl")] == [" a", " d"]


def test_a_shared_system_prompt_makes_nothing_alike(tmp_path: Path) -> None:
    system = {"role": "system", "content": " ".join(f"rule{number}" for number in range(300))}
    rows = [
        rollout(number, 0, f"the answer is number {number} because of reason {number}") for number in range(3)
    ]
    for row in rows:
        row["responses_create_params"]["input"].insert(0, system)
    call = {"type": "function_call", "call_id": "c", "name": "look_up", "arguments": '{"word": "%s"}'}
    for word in ("tree and leaf and root", "river and sea and lake"):
        rows.append(rollout(9, 0, ""))
        rows[-1]["response"]["output"] = [{**call, "arguments": call["arguments"] % word}]
    again = rollout(9, 1, "")
    again["response"]["output"] = [{**rows[-1]["response"]["output"][0], "call_id": "another"}]
    source = write(tmp_path / "in.jsonl", [*rows, again])
    dedup([source], tmp_path / "near.jsonl", near=0.5)
    assert values(tmp_path / "near.jsonl") == rows
    dedup([source], tmp_path / "exact.jsonl")
    assert values(tmp_path / "exact.jsonl") == rows


def test_scripts_without_spaces_have_words() -> None:
    assert len(runs_of("東京は日本の首都です。人口は多い。")) > 5
    assert runs_of("One, two; THREE four five six") == {"one two three four five", "two three four five six"}


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in.jsonl", [rollout(0, repeat, "same") for repeat in range(3)])
    command = ["data", "dedup", str(source), "-o", str(tmp_path / "out.jsonl")]
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 0
    assert (
        "1 rows, from 3\n  repeated 2\n  1 rows have repeats; the most alike: 3 rows"
        in capsys.readouterr().out
    )
    with pytest.raises(SystemExit):
        main([*command, "--near", "0.9", "--overwrite", "--json"])
    assert json.loads(capsys.readouterr().out)["counts"] == {"repeated": 2}
