"""The ids of a collection's tasks: of rows without ids, of rows that share one, and of older collections."""

from __future__ import annotations

import shutil
from pathlib import Path

import orjson
import pytest

import collecting
import rollbook
from rollbook.audit.result import Verdict
from rollbook.collect.input import read_input
from rollbook.data.dedup import dedup
from rollbook.data.merge import merge
from rollbook.data.profile import profile
from rollbook.errors import UsageError
from rollbook.query.session import Session
from rollbook.records.identity import task_digest, task_id

BEGUN_BEFORE = Path(__file__).parent / "begun_before"  # by the version before ids were of what is shown


def ids(path: Path) -> list[str]:
    return [item.task_id for item in read_input(path).items(1)]


def begun(directory: Path) -> Path:
    for path in BEGUN_BEFORE.iterdir():
        shutil.copy(path, directory)
    collecting.config(directory)
    return directory / "out.jsonl"


def test_a_collection_begun_before_goes_on_with_its_names(tmp_path: Path) -> None:
    output = begun(tmp_path)
    before = output.read_bytes()
    names = [
        "row-60429200250f291c7456",
        "row-193cb9b7a5221c75ad97",
        "named",
        "row-60429200250f291c7456~2",
        "row-84e94ceb94c4d29420dd",
    ]
    progress = collecting.run(tmp_path, "num_repeats=2", f"input_jsonl_fpath={tmp_path / 'in.jsonl'}")
    assert (progress.status, progress.done) == ("completed", 10)
    collecting.assert_exactly_once(output, {f"{name}#{repeat}" for name in names for repeat in range(2)})
    assert set(before.splitlines()) <= set(output.read_bytes().splitlines())
    assert rollbook.audit(output).verdict == Verdict.BALANCED
    # Digests would be of the rows as they were given, and those of the first lines are of what was shown.
    assert not any("_rb_task_digest" in row for row in collecting.results(output))
    counted = "select count(distinct task_id), count(*) from rollouts"
    assert list(Session([output]).run(counted).batches) == [[(5, 10)]]


def test_what_was_collected_before_is_covered(tmp_path: Path) -> None:
    output = begun(tmp_path)
    (tmp_path / "out_manifest.json").unlink()
    covered = merge([output], tmp_path / "all.jsonl", tasks=tmp_path / "in.jsonl", repeats=2).coverage
    assert covered == {"expected": 10, "ok": 4, "missing": 6}
    assert profile([output], None).details["tasks"] == 4


def test_rows_without_ids_are_named_by_what_they_show(tmp_path: Path) -> None:
    """Those that show the same and expect different answers are told apart by their order."""
    rows = [
        collecting.row(None),
        collecting.row(None, expected_answer="3"),
        collecting.row(None, "2 + 2?"),
        {"prompt": "2 + 2?", **collecting.row(None), "_ng_task_index": 7},
    ]
    name, other = task_id(rows[0]), task_id(rows[2])
    found = ids(collecting.write_rows(tmp_path / "in.jsonl", rows))
    assert found == [name, f"{name}~2", other, f"{name}~3"]
    assert name == task_id([{"role": "user", "content": "What is 1 + 1?"}])


def test_two_tasks_with_one_id_are_collected_apart(tmp_path: Path) -> None:
    rows = [
        collecting.row("1000", "What is 1 + 1?"),
        collecting.row("7"),
        collecting.row("1000", "What is 2 + 2?", expected_answer="4"),
        collecting.row("1000", "What is 1 + 1?", expected_answer="3"),
    ]
    collecting.write_rows(tmp_path / "in.jsonl", rows)
    collecting.config(tmp_path)
    said: list[str] = []
    assert collecting.run(tmp_path, said=said).status == "completed"
    marks = [str(task_digest(row))[:8] for row in rows]
    names = ["1000", "7", f"1000~{marks[2]}", "1000~2"]
    assert collecting.keys(tmp_path / "out.jsonl") == [f"{name}#0" for name in names]
    (warning,) = [text for text in said if "have the id of an earlier row" in text]
    assert warning.startswith("2 rows of ") and f"1000~{marks[2]}, 1000~2" in warning
    shown = Session([tmp_path / "out.jsonl"]).run("select task_id from rollouts order by group_idx").batches
    assert [name for batch in shown for (name,) in batch] == [
        f"1000~{marks[0]}",
        "7",
        f"1000~{marks[2]}",
        "1000~2",
    ]
    covered = merge([tmp_path / "out.jsonl"], tmp_path / "all.jsonl", tasks=tmp_path / "in.jsonl").coverage
    assert covered == {"expected": 4, "ok": 4, "missing": 0}


def test_a_task_that_is_added_later_does_not_rename_what_is_done(tmp_path: Path) -> None:
    collecting.write_rows(tmp_path / "in.jsonl", [collecting.row("a"), collecting.row("b")])
    collecting.config(tmp_path)
    collecting.run(tmp_path)
    done = collecting.keys(tmp_path / "out.jsonl")
    with (tmp_path / "in.jsonl").open("ab") as file:
        file.write(orjson.dumps(collecting.row("a", "What is 3 - 1?")) + b"\n")
    collecting.run(tmp_path)
    assert collecting.keys(tmp_path / "out.jsonl")[:2] == done
    assert len(collecting.keys(tmp_path / "out.jsonl")) == 3


def test_one_task_twice_is_refused(tmp_path: Path) -> None:
    rows = [collecting.row("a"), collecting.row("a", "other"), collecting.row("a")]
    with pytest.raises(UsageError, match=r"in\.jsonl:3: the id 'a' is already on line 1"):
        read_input(collecting.write_rows(tmp_path / "in.jsonl", rows))


def test_a_collected_row_says_what_its_task_shows(tmp_path: Path) -> None:
    """As it was given, whatever the environment made of it."""
    task = collecting.row(None, "What is 1 + 1?")
    collecting.write_rows(tmp_path / "in.jsonl", [task])
    (tmp_path / "env.py").write_text(
        "from rollbook.envs.base import Environment\n"
        "from rollbook.rollouts.types import Feedback, Opening\n\n\n"
        "class Mine(Environment):\n"
        "    def start(self, task):\n"
        "        return Opening(messages=[{'role': 'system', 'content': 'Be brief.'}, *task.messages])\n\n"
        "    def step(self, message):\n"
        "        return Feedback(reward=1.0)\n"
    )
    collecting.config(tmp_path)
    config = (tmp_path / "rollbook.yaml").read_text()
    config = config.replace("name: arithmetic", f"name: {tmp_path / 'env.py'}:Mine")
    (tmp_path / "rollbook.yaml").write_text(config)
    collecting.run(tmp_path)
    (row,) = collecting.results(tmp_path / "out.jsonl")
    assert len(row["responses_create_params"]["input"]) == 2
    assert row["_rb_task_digest"] == task_digest(task) == task_digest(row)
    covered = merge([tmp_path / "out.jsonl"], tmp_path / "all.jsonl", tasks=tmp_path / "in.jsonl").coverage
    assert covered == {"expected": 1, "ok": 1, "missing": 0}


def test_numbers_past_64_bits_keep_their_digits(tmp_path: Path) -> None:
    big = b"123456789012345678901234567890"
    collecting.write_rows(tmp_path / "in.jsonl", [collecting.row("a"), collecting.row("b", "other")])
    collecting.config(tmp_path)
    collecting.run(tmp_path)
    output = tmp_path / "out.jsonl"
    output.write_bytes(
        output.read_bytes().replace(b'"expected_answer"', b'"big":' + big + b',"expected_answer"')
    )
    assert output.read_bytes().count(big) == 2
    twice = tmp_path / "twice.jsonl"
    twice.write_bytes(output.read_bytes() * 2)
    dedup([twice], tmp_path / "once.jsonl", rejected=tmp_path / "rejected.jsonl")
    assert (tmp_path / "once.jsonl").read_bytes().count(big) == 2
    assert (tmp_path / "rejected.jsonl").read_bytes().count(big) == 2
