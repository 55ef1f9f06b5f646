"""A merged file is whole: every row once, every bad line named, everything that should be there counted."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import orjson
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.cli.main import main
from rollbook.data.coverage import planned_by
from rollbook.data.merge import Duplicates, merge
from rollbook.data.sample import sample
from rollbook.errors import BadFileError, BadLineError, UsageError
from rollbook.records.identity import content_id, task_id
from rollbook.records.rows import read_rows


def row(task: int, repeat: int = 0, **fields: Any) -> dict[str, Any]:
    return {
        "_rb_key": f"t{task}#{repeat}",
        "_ng_task_index": task,
        "_ng_rollout_index": repeat,
        "reward": 1.0,
        **fields,
    }


def write(path: Path, rows: list[dict[str, Any]], end: bytes = b"\n") -> Path:
    path.write_bytes(b"\n".join(orjson.dumps(row) for row in rows) + (end if rows else b""))
    return path


def keys(path: Path) -> list[str]:
    return [row.value()["_rb_key"] for row in read_rows(path)]


def test_all_rows_byte_by_byte(tmp_path: Path) -> None:
    shards = [
        write(tmp_path / f"chunk_{n}.jsonl", [row(10 * n + task) for task in range(10)]) for n in range(3)
    ]
    manifest = merge([f"{tmp_path}/chunk_*.jsonl"], tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == b"".join(shard.read_bytes() for shard in shards)
    assert (manifest.rows_in, manifest.rows_out) == (30, 30)
    assert [record.rows for record in manifest.inputs] == [10, 10, 10]
    digests = [xxhash.xxh3_128(shard.read_bytes()).hexdigest() for shard in shards]
    assert [record.xxh3_128 for record in manifest.inputs] == digests
    assert manifest.coverage == {}
    assert json.loads((tmp_path / "out_manifest.json").read_text())["command"] == "merge"


@pytest.mark.parametrize("end", [b"\n", b""])
def test_whole_files_are_copied_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: bytes
) -> None:
    monkeypatch.setattr("rollbook.data.job._CHUNK", 100)
    shards = [
        write(
            tmp_path / f"{n}.jsonl",
            [row(100 * n + task, text="é" * (task * n)) for task in range(60)],
            end=end,
        )
        for n in range(3)
    ]
    progress = Told()
    manifest = merge(shards, tmp_path / "out.jsonl", progress=progress)
    whole = b"".join(shard.read_bytes().rstrip(b"\n") + b"\n" for shard in shards)
    assert (tmp_path / "out.jsonl").read_bytes() == whole
    assert [record.rows for record in manifest.inputs] == [60, 60, 60]
    digests = [xxhash.xxh3_128(shard.read_bytes()).hexdigest() for shard in shards]
    assert [record.xxh3_128 for record in manifest.inputs] == digests
    assert manifest.output_xxh3_128 == xxhash.xxh3_128(whole).hexdigest()
    assert manifest.output_bytes == len(whole)


class Told:
    """What a command said about its progress: of each pass its size and how much of it was done."""

    def __init__(self) -> None:
        self.passes: list[list[int]] = []

    def begin(self, what: str, size: int) -> None:
        self.passes.append([size, 0])

    def advance(self, size: int) -> None:
        self.passes[-1][1] += size


@pytest.mark.parametrize(
    "options", [{}, {"ordered": True}, {"duplicates": Duplicates.FIRST}], ids=["plain", "ordered", "first"]
)
def test_the_bar_of_every_pass_ends_at_its_end(tmp_path: Path, options: dict[str, Any]) -> None:
    rows = [row(task, pad="x" * 100) for task in range(3000)]
    late = [*rows, row(7)] if options.get("duplicates") else rows
    progress = Told()
    merge([write(tmp_path / "a.jsonl", late)], tmp_path / "out.jsonl", progress=progress, **options)
    assert len(progress.passes) >= 2
    assert all(done == size == (tmp_path / "a.jsonl").stat().st_size for size, done in progress.passes)


def test_a_missing_last_newline_glues_nothing(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", [row(0), row(1)], end=b"")
    b = write(tmp_path / "b.jsonl", [row(2)], end=b"")
    empty = write(tmp_path / "c.jsonl", [])
    manifest = merge([a, b, empty], tmp_path / "out.jsonl")
    assert keys(tmp_path / "out.jsonl") == ["t0#0", "t1#0", "t2#0"]
    assert (tmp_path / "out.jsonl").read_bytes().endswith(b"}\n")
    assert manifest.counts == {"newlines_added": 2}


GOOD = orjson.dumps(row(0))


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        (GOOD + orjson.dumps(row(1)) + b"\n", 1, "not valid JSON"),
        (
            GOOD + b"\n" + orjson.dumps(row(1))[:-9] + b"\n" + orjson.dumps(row(2)) + b"\n",
            2,
            "not valid JSON",
        ),
        (GOOD + b"\n" + orjson.dumps(row(1))[:-9], 2, "not valid JSON"),
        (GOOD + b"\n\n[1, 2]\n", 3, "not a JSON object"),
        (GOOD + b"\nnull\n", 2, "not a JSON object"),
        (GOOD + b"\n\0\0\0\0\n", 2, "not valid JSON"),
        (GOOD + b'\n{"_rb_key":"t1#0","x":"\xff"}\n', 2, "not valid JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, text: bytes, line: int, why: str) -> None:
    write(tmp_path / "a.jsonl", [row(7)])
    (tmp_path / "b.jsonl").write_bytes(text)
    with pytest.raises(BadLineError, match=rf"b\.jsonl:{line}: {why}"):
        merge([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], tmp_path / "out.jsonl")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl"]


def test_blank_lines_go_and_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD + b"\n\n" + orjson.dumps(row(1)) + b"\n  \n")
    manifest = merge([tmp_path / "a.jsonl"], tmp_path / "out.jsonl")
    assert keys(tmp_path / "out.jsonl") == ["t0#0", "t1#0"]
    assert b"\n\n" not in (tmp_path / "out.jsonl").read_bytes()
    assert manifest.counts == {"blank_lines": 2}


def test_duplicates_are_named_with_both_places(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", [row(0), row(1), row(2)])
    b = write(tmp_path / "b.jsonl", [row(3), row(1, reward=0.0), row(2)])
    with pytest.raises(BadLineError) as caught:
        merge([a, b], tmp_path / "out.jsonl")
    text = str(caught.value)
    assert text.startswith(f"{b}:2: duplicate key 't1#0', first seen at {a}:2")
    assert f"{b}:3: duplicate key 't2#0', first seen at {a}:3" in text
    assert "--duplicates first" in text
    assert not (tmp_path / "out.jsonl").exists()
    manifest = merge([a, b], tmp_path / "out.jsonl", duplicates=Duplicates.FIRST)
    assert keys(tmp_path / "out.jsonl") == ["t0#0", "t1#0", "t2#0", "t3#0"]
    assert manifest.counts == {"duplicates_dropped": 2}
    assert [found.value()["reward"] for found in read_rows(tmp_path / "out.jsonl")] == [1.0] * 4


def test_many_duplicates_are_summed_up(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", [row(task) for task in range(20)])
    b = write(tmp_path / "b.jsonl", [row(task) for task in range(20)])
    with pytest.raises(BadLineError, match=r"\.\.\. and 15 more"):
        merge([a, b], tmp_path / "out.jsonl")


def test_rows_of_other_collectors_are_known_by_what_they_show(tmp_path: Path) -> None:
    foreign = [{"_ng_task_index": task, "_ng_rollout_index": 0, "reward": 0.5} for task in range(3)]
    a, b = write(tmp_path / "a.jsonl", foreign), write(tmp_path / "b.jsonl", foreign[1:2])
    assert merge([a, b], tmp_path / "other.jsonl").rows_out == 4  # an index means something in its file only
    asked = [{**row, "prompt": f"question {row['_ng_task_index']}"} for row in foreign]
    a, b = write(tmp_path / "a.jsonl", asked), write(tmp_path / "b.jsonl", asked[1:2])
    twice = rf"b\.jsonl:1: duplicate key '{task_id(asked[1])}#0', first seen at .*a\.jsonl:2"
    with pytest.raises(BadLineError, match=twice):
        merge([a, b], tmp_path / "out.jsonl")
    c = write(tmp_path / "c.jsonl", [{"text": "no key"}, {"text": "no key"}])
    assert merge([a, c], tmp_path / "out.jsonl").counts == {"rows_without_key": 2}


def collected(
    path: Path, rows: list[dict[str, Any]], *, planned: int, repeats: int = 1, failed: int = 0
) -> Path:
    manifest = {
        "input": "tasks.jsonl",
        "input_sha256": path.stem,
        "rows": planned,
        "repeats": repeats,
        "coverage": {"expected": planned * repeats, "ok": len(rows), "failed": failed, "missing": 0},
    }
    path.with_name(f"{path.stem}_manifest.json").write_text(json.dumps(manifest))
    return write(path, rows)


def test_coverage_from_the_manifests_of_the_collections(tmp_path: Path) -> None:
    a = collected(tmp_path / "a.jsonl", [row(0), row(0, 1), row(1)], planned=2, repeats=2, failed=1)
    b = collected(tmp_path / "b.jsonl", [row(2)], planned=1)
    manifest = merge([a, b], tmp_path / "out.jsonl")
    assert manifest.coverage == {"expected": 5, "ok": 4, "failed": 1, "missing": 1}
    again = merge([tmp_path / "out.jsonl"], tmp_path / "again.jsonl")  # a merge says what it was to hold
    assert again.coverage == {"expected": 5, "ok": 4, "failed": 1, "missing": 1}
    c = write(tmp_path / "c.jsonl", [row(9)])
    partly = merge([a, b, c], tmp_path / "partly.jsonl")
    assert partly.coverage == {}
    assert partly.details == {"without_manifest": [str(c)]}


def test_what_two_plans_promise_is_expected_once(tmp_path: Path) -> None:
    """Without that, a merge of overlapping collections would call half of its rows missing."""
    a = collected(tmp_path / "a.jsonl", [row(0), row(1)], planned=3)
    b = collected(tmp_path / "b.jsonl", [row(1), row(2)], planned=2)
    both = merge([a, b], tmp_path / "both.jsonl", duplicates=Duplicates.FIRST)
    assert both.coverage == {"expected": 4, "ok": 3, "failed": 0, "missing": 1}
    # Two halves of one plan, and a copy: the plan is counted once to begin with.
    c = collected(tmp_path / "c.jsonl", [row(2), row(1)], planned=2)
    manifest = json.loads((tmp_path / "b_manifest.json").read_text())
    (tmp_path / "c_manifest.json").write_text(json.dumps(manifest))
    three = merge([a, b, c], tmp_path / "three.jsonl", duplicates=Duplicates.FIRST)
    assert three.counts["duplicates_dropped"] == 3
    assert three.coverage == {"expected": 4, "ok": 3, "failed": 0, "missing": 1}


def test_a_merge_merged_with_another_attempt_at_its_tasks(tmp_path: Path) -> None:
    a = collected(tmp_path / "a.jsonl", [row(0), row(1)], planned=3)
    b = collected(tmp_path / "b.jsonl", [row(1), row(2)], planned=3)
    (tmp_path / "b_manifest.json").write_text((tmp_path / "a_manifest.json").read_text())  # of one input
    merge([a], tmp_path / "merged.jsonl")
    both = merge([tmp_path / "merged.jsonl", b], tmp_path / "both.jsonl", duplicates=Duplicates.FIRST)
    assert both.coverage == {"expected": 3, "ok": 3, "failed": 0, "missing": 0}
    # Where rows are counted as they come, each attempt was to bring all of them.
    assert planned_by([a, b]).coverage(4) == {"expected": 6, "ok": 4, "failed": 0, "missing": 2}


def test_the_repeats_of_a_list_of_tasks_are_those_of_the_manifest(tmp_path: Path) -> None:
    tasks = write(tmp_path / "tasks.jsonl", [{"task_id": "t0"}, {"task_id": "t1"}])
    a = collected(tmp_path / "a.jsonl", [row(0), row(0, 1), row(1, 1)], planned=2, repeats=2)
    manifest = merge([a], tmp_path / "out.jsonl", tasks=tasks)
    assert manifest.coverage == {"expected": 4, "ok": 3, "missing": 1}
    assert manifest.counts == {}


def test_a_manifest_that_is_none(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", [row(0)])
    (tmp_path / "a_manifest.json").write_text("{")
    with pytest.raises(BadFileError, match=r"a_manifest\.json: not a manifest"):
        merge([a], tmp_path / "out.jsonl")


def test_coverage_and_order_from_a_list_of_tasks(tmp_path: Path) -> None:
    tasks = write(tmp_path / "tasks.jsonl", [{"task_id": f"t{task}"} for task in (2, 0, 1)])
    shards = [
        write(tmp_path / "a.jsonl", [row(0, 1), row(1), row(8)]),
        write(tmp_path / "b.jsonl", [row(2), row(0, 0), row(1, 2)]),
    ]
    manifest = merge(shards, tmp_path / "out.jsonl", tasks=tasks, repeats=2, ordered=True)
    assert keys(tmp_path / "out.jsonl") == ["t2#0", "t0#0", "t0#1", "t1#0", "t8#0", "t1#2"]
    assert manifest.coverage == {"expected": 6, "ok": 4, "missing": 2}
    assert manifest.counts == {"not_in_tasks": 2}
    unordered = merge(shards, tmp_path / "as_they_come.jsonl", tasks=tasks, repeats=2)
    assert unordered.coverage == manifest.coverage
    assert keys(tmp_path / "as_they_come.jsonl")[:3] == ["t0#1", "t1#0", "t8#0"]


def test_tasks_without_names_are_known_by_what_they_show(tmp_path: Path) -> None:
    unnamed = [{"responses_create_params": {"input": text}} for text in ("a", "b", "a")]
    tasks = write(tmp_path / "tasks.jsonl", unnamed)
    names = [content_id(task) for task in unnamed]
    ours = [{"_rb_key": f"{name}#0"} for name in (names[1], f"{names[2]}~2", names[0])]
    manifest = merge([write(tmp_path / "a.jsonl", ours)], tmp_path / "out.jsonl", tasks=tasks, ordered=True)
    assert manifest.coverage == {"expected": 3, "ok": 3, "missing": 0}
    assert keys(tmp_path / "out.jsonl") == [f"{names[0]}#0", f"{names[1]}#0", f"{names[0]}~2#0"]
    foreign = [{"_ng_task_index": index, "_ng_rollout_index": 0, **unnamed[index]} for index in (2, 0)]
    manifest = merge([write(tmp_path / "b.jsonl", foreign)], tmp_path / "foreign.jsonl", tasks=tasks)
    assert manifest.coverage == {"expected": 3, "ok": 2, "missing": 1}


def test_input_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(task, repeat, pad="x" * 50) for task in range(40) for repeat in range(3)]
    mixed = random.Random(3).sample(rows, len(rows))
    shards = [write(tmp_path / f"{n}.jsonl", mixed[n::4]) for n in range(4)]
    for budget in (1 << 20, 2000):  # in memory, and in many runs with several rounds of merging
        monkeypatch.setattr("rollbook.data.external_sort._OPEN_RUNS", 3)
        monkeypatch.setattr(
            "rollbook.data.external_sort.ExternalSort.__init__.__kwdefaults__", {"budget": budget}
        )
        merge(shards, tmp_path / "out.jsonl", ordered=True, overwrite=True)
        assert [found.value() for found in read_rows(tmp_path / "out.jsonl")] == rows
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_order_needs_something_to_order_by(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", [{"_rb_key": "x#0"}])
    with pytest.raises(BadLineError, match=r"a\.jsonl:1: no _ng_task_index to order by.*--tasks FILE"):
        merge([a], tmp_path / "out.jsonl", ordered=True)


def test_indices_that_begin_anew_in_each_chunk_are_noticed(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", [row(0), row(1)])
    b = write(tmp_path / "b.jsonl", [{**row(0), "_rb_key": "u0#0"}])
    assert merge([a, b], tmp_path / "out.jsonl", ordered=True).counts == {"sharing_an_index": 1}


@pytest.mark.parametrize("ending", [".jsonl.zst", ".jsonl.gz", ".parquet"])
def test_compressed_and_parquet(tmp_path: Path, ending: str) -> None:
    a = write(tmp_path / "a.jsonl", [row(0), row(1)])
    sample([write(tmp_path / "b.jsonl", [row(2), row(3)])], tmp_path / f"packed{ending}", fraction=1)
    merge([a, tmp_path / f"packed{ending}"], tmp_path / f"out{ending}")
    assert keys(tmp_path / f"out{ending}") == ["t0#0", "t1#0", "t2#0", "t3#0"]
    with pytest.raises(
        BadLineError, match=rf"b\.jsonl:1: duplicate key 't2#0', first seen at .*packed{ending}:1"
    ):
        merge([tmp_path / f"packed{ending}", tmp_path / "b.jsonl"], tmp_path / "twice.jsonl")


def test_names_with_the_letters_of_patterns(tmp_path: Path) -> None:
    a = write(tmp_path / "a[1].jsonl", [row(0)])
    write(tmp_path / "a1.jsonl", [row(1)])
    merge([a], tmp_path / "out.jsonl")
    assert keys(tmp_path / "out.jsonl") == ["t0#0"]


@pytest.mark.parametrize("ending", ["ndjson", "jsonl"])
def test_files_beside_a_collection_are_left_out(ending: str, tmp_path: Path) -> None:
    write(tmp_path / "rollouts_0.jsonl", [row(0)])
    write(tmp_path / f"rollouts_0_failures.{ending}", [row(1)])
    manifest = merge([f"{tmp_path}/rollouts_*.*"], tmp_path / "out.jsonl")
    assert manifest.left_out == {str(tmp_path / f"rollouts_0_failures.{ending}"): "failures of rollouts_0"}
    assert manifest.rows_out == 1


def test_options_that_make_no_sense(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", [row(0)])
    with pytest.raises(UsageError, match="--repeats 0"):
        merge([a], tmp_path / "out.jsonl", repeats=0)
    with pytest.raises(UsageError, match=r"--tasks .*none\.jsonl: no such file"):
        merge([a], tmp_path / "out.jsonl", tasks=tmp_path / "none.jsonl")


@settings(max_examples=30, deadline=None)
@given(
    shards=st.lists(
        st.lists(st.tuples(st.text(min_size=1, max_size=4), st.integers(0, 3)), max_size=8), max_size=4
    ),
    newline=st.booleans(),
    ours=st.booleans(),
)
def test_first_of_every_key_whatever_the_shards(
    shards: list[list[tuple[str, int]]], newline: bool, ours: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("merge")
    paths, expected, seen = [], [], set()
    for number, shard in enumerate(shards):
        rows = [
            {"_rb_key": f"{name}#{repeat}"} if ours else {"task_id": name, "_ng_rollout_index": repeat}
            for name, repeat in shard
        ]
        paths.append(write(directory / f"{number}.jsonl", rows, end=b"\n" if newline else b""))
        for key, value in zip(shard, rows, strict=True):
            if key not in seen:
                seen.add(key)
                expected.append(value)
    if not paths:
        return
    manifest = merge(paths, directory / "out.jsonl", duplicates=Duplicates.FIRST)
    assert [found.value() for found in read_rows(directory / "out.jsonl")] == expected
    total = sum(map(len, shards))
    assert manifest.rows_in == total
    assert manifest.counts.get("duplicates_dropped", 0) == total - len(expected)


def run(words: list[str]) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        main(["data", "merge", *words])
    return ended.value.code


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = collected(tmp_path / "a.jsonl", [row(0)], planned=2)
    assert run([str(a), "-o", str(tmp_path / "out.jsonl")]) == 3
    assert "2 expected, 1 ok, 0 failed, 1 missing" in capsys.readouterr().out
    assert run([str(a), "-o", str(tmp_path / "out.jsonl"), "--allow-missing", "--overwrite"]) == 0
    b = write(tmp_path / "b.jsonl", [row(0)])
    assert run([str(a), str(b), "-o", str(tmp_path / "twice.jsonl")]) == 1
    assert "first seen at" in capsys.readouterr().err
    assert run([str(b), "-o", str(tmp_path / "b2.jsonl"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows_out"] == 1
