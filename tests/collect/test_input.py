"""The rows of an input are known, checked and named before anything is sent."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import orjson
import pytest

from collecting import config, keys, row, run, small_input, write_rows
from rollbook.collect.input import Agents, Input, read_input
from rollbook.errors import BadFileError, UsageError
from rollbook.records.identity import content_id


def ids(found: Input) -> list[str]:
    return [item.task_id for item in found.items(1)]


GOOD = orjson.dumps(row("good")).decode()
BAD = {
    "not JSON": "{",
    "cut short": GOOD[:-3],
    "two on a line": '{"responses_create_params":{"input":"a"}}{"responses_create_params":{"input":"b"}}',
    "no params": '{"id": 1}',
    "no input": '{"responses_create_params": {}}',
    "input is a number": '{"responses_create_params": {"input": 3}}',
    "no messages": '{"responses_create_params": {"input": []}}',
    "an item that cannot be sent on": (
        '{"responses_create_params": {"input": [{"role": "user", "content": "a"}, {"type": "mesage"}]}}'
    ),
    "an id that is a list": '{"id": [1], "responses_create_params": {"input": "x"}}',
    "a list": "[1, 2]",
    "half a character": '{"responses_create_params": {"input": "\\ud800"}}',
    "too deep": '{"responses_create_params":{"input":"x"},"z":' + "[" * 5000 + "]" * 5000 + "}",
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_malformed_row_is_named_by_its_line(bad: str, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(f"{GOOD}\n\n{bad}\n")
    with pytest.raises(UsageError, match=r"(?s)1 row of the input.*in\.jsonl:3: "):
        read_input(path)


def test_bytes_that_are_no_text_are_named_even_in_fields_nobody_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(GOOD.encode() + b'\n{"id":"x","responses_create_params":{"input":"q"},"extra":"\xff"}\n')
    with pytest.raises(UsageError, match=r"in\.jsonl:2: "):
        read_input(path)


def test_all_malformed_rows_are_reported_and_nothing_is_sent(tmp_path: Path) -> None:
    lines = [GOOD.replace("good", f"good{number}") for number in range(30_000)]
    wrong = [0, 17, 9_999, 29_999]  # in several blocks of the file
    for number in wrong:
        lines[number] = '{"id": 1}'
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    config(tmp_path)
    with pytest.raises(UsageError, match="4 rows") as raised:
        run(tmp_path)
    for number in wrong:
        assert f"in.jsonl:{number + 1}: " in str(raised.value)
    assert not (tmp_path / "out.jsonl").exists()


def test_of_many_malformed_rows_some_are_shown_and_all_are_named(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("{}\n" * 25 + GOOD + "\n" + "{}\n" * 25)
    with pytest.raises(UsageError, match=r"(?s)50 rows.*and 30 more: lines 21-25, 27-51$"):
        read_input(tmp_path / "in.jsonl")


def test_malformed_rows_past_the_limit_are_not_used_and_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(f"{GOOD}\n{{\n")
    assert ids(read_input(tmp_path / "in.jsonl", limit=1)) == ["good"]


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_input_without_rows(content: str, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(content)
    with pytest.raises(UsageError, match="has no rows"):
        read_input(tmp_path / "in.jsonl")


def test_an_input_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.jsonl: no such file"):
        read_input(tmp_path / "nowhere.jsonl")


def test_a_duplicate_id_names_both_lines(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "in.jsonl", [row("a"), row("b"), row("c"), row("b")])
    with pytest.raises(UsageError, match=r"in\.jsonl:4: the id 'b' is already on line 2"):
        read_input(path)


def test_the_number_1_and_the_text_1_are_the_same_id(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "in.jsonl", [row("1"), {**row(None), "task_id": 1}])
    with pytest.raises(UsageError, match="'1' is already on line 1"):
        read_input(path)


def test_identical_rows_without_ids_are_numbered(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "in.jsonl", [row(None), row(None, "other"), row(None), row(None)])
    found = ids(read_input(path))
    assert found[2:] == [f"{found[0]}~2", f"{found[0]}~3"]
    assert len(set(found)) == 4


def test_a_content_id_does_not_depend_on_the_order_of_keys_nor_on_indices() -> None:
    one = b'{"responses_create_params":{"input":"q","top_p":1},"answer":"2","_ng_task_index":3}'
    other = b'{"answer": "2", "responses_create_params": {"top_p": 1, "input": "q"}}'
    same = [content_id(orjson.loads(line)) for line in (one, other)]
    assert same[0] == same[1] != content_id(orjson.loads(other.replace(b'"2"', b'"3"')))


@pytest.mark.parametrize("named", [True, False])
def test_blank_lines_and_a_missing_last_newline_change_nothing(named: bool, tmp_path: Path) -> None:
    rows = [row(f"t{number}" if named else None, f"question {number}") for number in range(5)]
    clean = read_input(write_rows(tmp_path / "clean.jsonl", rows))
    lines = [orjson.dumps(item) for item in rows]
    for name, content in {
        "no newline": b"\n".join(lines),
        "blank": b"\n\n" + b"\n  \n".join(lines) + b"\n\n\n",
        "blank and no newline": b"\n\n".join(lines),
        "one blank and no newline": b"\n".join([*lines[:2], b"", *lines[2:]]),
        "windows": b"\r\n".join(lines) + b"\r\n",
        "indented": b"".join(b"  " + line + b" \n" for line in lines),
    }.items():
        (tmp_path / "odd.jsonl").write_bytes(content)
        odd = read_input(tmp_path / "odd.jsonl")
        assert ids(odd) == ids(clean), name
        assert len({item.line.strip() for item in odd.items(1)}) == 5, name


def test_a_row_that_stretches_over_two_lines_is_refused_also_beside_two_on_one(tmp_path: Path) -> None:
    stretched = '{"responses_create_params":\n{"input":"x"}}'
    double = '{"responses_create_params":{"input":"y"}}{"responses_create_params":{"input":"z"}}'
    (tmp_path / "in.jsonl").write_text(f"{stretched}\n{double}\n")
    with pytest.raises(UsageError, match="3 rows"):
        read_input(tmp_path / "in.jsonl")


def test_limit_and_repeats(tmp_path: Path) -> None:
    path = small_input(tmp_path, 10)
    found = read_input(path, limit=3)
    assert found.rows == 3
    assert [(item.task_id, item.repeat) for item in found.items(2)] == [
        (f"t{number}", repeat) for number in range(3) for repeat in range(2)
    ]
    assert read_input(path, limit=99).rows == 10


def test_only_what_is_left_is_drawn(tmp_path: Path) -> None:
    found = read_input(small_input(tmp_path, 4))
    done = np.array([[True, True], [False, True], [True, True], [False, False]])
    assert [(item.row, item.repeat) for item in found.items(2, done)] == [(1, 0), (3, 0), (3, 1)]
    assert list(found.items(2, np.ones((4, 2), dtype=np.bool_))) == []


def test_rows_added_to_the_input_are_collected_on_resume(tmp_path: Path) -> None:
    path = small_input(tmp_path, 3)
    config(tmp_path)
    run(tmp_path)
    with path.open("ab") as file:
        file.write(orjson.dumps(row("new")) + b"\n")
    progress = run(tmp_path)
    assert (progress.done_before, progress.done) == (3, 4)
    assert keys(tmp_path / "out.jsonl")[3:] == ["new#0"]


def test_a_last_row_without_newline_may_be_followed_but_not_lengthened(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    lines = [orjson.dumps(row(None, f"question {number}")) for number in range(2)]
    path.write_bytes(b"\n".join(lines))
    was = read_input(path)
    old = was.size, was.sha256  # before the file changes
    path.write_bytes(b"\n".join(lines) + b"\n" + lines[0] + b"\n")
    assert read_input(path).begins_with(*old)
    path.write_bytes(b"\n".join(lines) + b" " + lines[0] + b"\n")
    assert not read_input(path, limit=1).begins_with(*old)


def test_an_input_with_one_changed_byte_is_refused(tmp_path: Path) -> None:
    path = small_input(tmp_path, 3)
    config(tmp_path)
    run(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"1 + 1", b"1 + 2", 1))
    with pytest.raises(UsageError, match=r"(?s)input_sha256: was '[0-9a-f]+', now '[0-9a-f]+'"):
        run(tmp_path)


def test_a_shorter_input_is_another_input(tmp_path: Path) -> None:
    path = small_input(tmp_path, 3)
    config(tmp_path)
    run(tmp_path)
    small_input(tmp_path, 2)
    with pytest.raises(UsageError, match="input_sha256"):
        run(tmp_path)
    assert path.exists()


def test_rows_of_a_dataset_without_an_expected_answer_are_refused_together(tmp_path: Path) -> None:
    good = [{"id": f"t{number}", "answer": {"is": number}} for number in range(3)]
    lines = [*good, {"id": "none"}, {"id": "null", "answer": None}, {"id": 7, "answer": ["a"]}]
    asked = {"responses_create_params": {"input": "q"}}
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({**line, **asked}) + "\n" for line in lines))
    env = {"name": "dataset", "answer_key": "answer.is"}

    with pytest.raises(UsageError) as refused:
        read_input(path, agents=Agents("a", env))
    assert "2 rows" in str(refused.value)
    assert "in.jsonl:4: it has no required field `answer`" in str(refused.value)
    assert re.search(r"in\.jsonl:5: expected .*, got `null` - at `answer`", str(refused.value))
    for other in ({"grader": "regex"}, {"name": "own.py:Env"}, {"answer_key": "id"}):
        assert read_input(path, agents=Agents("a", {**env, **other})).rows == len(lines)


def test_what_an_agent_server_gets_may_hold_items_that_only_it_knows(tmp_path: Path) -> None:
    odd = {"responses_create_params": {"input": [{"type": "web_search_call"}]}}
    path = write_rows(tmp_path / "in.jsonl", [odd])
    with pytest.raises(UsageError, match="an item of an unknown type: 'web_search_call'"):
        read_input(path)
    assert read_input(path, agents=Agents("a", {"name": "gym"})).rows == 1


@pytest.mark.parametrize("change", [b"", b'{"id": "t9"}\n' * 3, b"{\n" * 3])
def test_an_input_that_changes_while_it_is_collected_is_named(change: bytes, tmp_path: Path) -> None:
    path = small_input(tmp_path, 3)
    items = read_input(path).items(1)
    path.write_bytes(change)
    with pytest.raises(BadFileError, match="row 1 changed while it was collected"):
        next(items)


def test_rows_of_another_shape_are_shown_a_good_one_once(tmp_path: Path) -> None:
    others = [{"text": "2 + 2?"}, {"messages": []}, {"problem": "2 + 2?", "solution": "4"}]
    path = write_rows(tmp_path / "in.jsonl", others * 10)
    with pytest.raises(UsageError, match="30 rows") as refused:
        read_input(path)
    said = str(refused.value)
    (example,) = [part for part in said.splitlines() if "a good row is like this: " in part]
    write_rows(path, [json.loads(example.partition("like this: ")[2])])
    assert read_input(path).rows == 1
