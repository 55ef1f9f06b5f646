"""The output alone says what is done; finished, it is complete, in input order, every line as it was."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import orjson
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from collecting import config, keys, row, run, small_input, write_rows
from rollbook.collect import collect as collector
from rollbook.collect.input import Input, read_input
from rollbook.collect.output import Found, find_done, put_in_order, verify
from rollbook.errors import BadLineError, Interrupted, LockedError
from rollbook.records.complete import file_facts
from rollbook.records.identity import rollout_key
from rollbook.records.locks import FileLock


class Files:
    """An output of ten rows."""

    def __init__(self, directory: Path) -> None:
        self.output = directory / "out.jsonl"
        self.rows = read_input(small_input(directory, 10))
        config(directory)
        run(directory)

    def find(self) -> Found:
        return find_done(self.output, self.rows, 1)

    def lines(self) -> list[bytes]:
        return self.output.read_bytes().splitlines(keepends=True)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.mark.parametrize("number", [0, 4, 9])
def test_a_line_taken_out_is_missed(files: Files, number: int) -> None:
    lines = files.lines()
    gone = orjson.loads(lines.pop(number))["_ng_task_index"]
    files.output.write_bytes(b"".join(lines))
    flags = files.find().flags
    assert flags is not None and [row for row in range(10) if not flags[row, 0]] == [gone]


def test_a_smaller_limit_in_between_makes_nobody_forget_what_is_done(tmp_path: Path) -> None:
    small_input(tmp_path, 10)
    config(tmp_path)
    run(tmp_path, "limit=8")
    said: list[str] = []
    assert run(tmp_path, "limit=2", "num_repeats=2", said=said).done == 4
    assert said == [f"{tmp_path / 'out.jsonl'} has 6 lines that are not in this plan; they are kept"]
    assert run(tmp_path).done_before == 8
    assert len(keys(tmp_path / "out.jsonl")) == len(set(keys(tmp_path / "out.jsonl"))) == 12


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"id":"foreign"}\n', "does not begin with '_rb_key'"),
        (b'{"_rb_key":"t0#0"}{"_rb_key":"t1#0"}\n', "glued together"),
        (b'{"_rb_key":"t0#0","reward":\n', "not valid JSON"),
        (b'{"_rb_key":"\xff#0"}\n', "not valid JSON"),
        (bytes(20) + b"\n", "NUL"),
    ],
)
def test_a_line_that_cannot_be_is_named(files: Files, line: bytes, why: str) -> None:
    lines = files.lines()
    files.output.write_bytes(b"".join(lines[:5]) + line + b"".join(lines[5:]))
    with pytest.raises(BadLineError, match=rf"out\.jsonl:6: .*{why}"):
        files.find()


@pytest.mark.parametrize("blank", [b"\n", b"  \t\r\n", b"\n\n\n"])
@pytest.mark.parametrize("place", [0, 5, 9, 10])
def test_blank_lines_are_no_lines(files: Files, blank: bytes, place: int) -> None:
    lines = files.lines()
    files.output.write_bytes(b"".join([*lines[:place], blank, *lines[place:]]))
    found = files.find()
    assert (found.count, found.unknown) == (10, 0)
    files.output.write_bytes(files.output.read_bytes() + blank)
    assert files.find().count == 10
    files.output.write_bytes(b"".join(lines[1:]))
    assert files.find().count == 9


def test_a_record_inside_a_record_is_none_of_the_scans_business(files: Files) -> None:
    lines = files.lines()
    inner = orjson.loads(lines[0])
    lines[1] = orjson.dumps({**orjson.loads(lines[1]), "rejected": inner, "text": lines[0].decode()}) + b"\n"
    files.output.write_bytes(b"".join(lines))
    assert files.find().count == 10


def test_a_key_on_two_lines_names_both(files: Files) -> None:
    lines = files.lines()
    files.output.write_bytes(b"".join([*lines, lines[3]]))
    with pytest.raises(BadLineError, match=r"out\.jsonl:11: line 4 has the same key"):
        files.find()


def test_keys_the_plan_does_not_have_are_counted_and_left(files: Files) -> None:
    with files.output.open("ab") as file:
        file.write(b'{"_rb_key":"stranger#0"}\n{"_rb_key":"t0#7"}\n{"_rb_key":"t0"}\n{"_rb_key":"t0#x"}\n')
    done = files.find()
    assert (done.count, done.unknown) == (10, 4)


def test_a_line_longer_than_a_block(tmp_path: Path) -> None:
    small_input(tmp_path, 2)
    output = tmp_path / "out.jsonl"
    pad = b"x" * (17 << 20)
    output.write_bytes(b'{"_rb_key":"t1#0","pad":"' + pad + b'"}\n{"_rb_key":"t0#0"}\n')
    assert find_done(output, read_input(tmp_path / "in.jsonl"), 1).count == 2


NAMES = st.text(
    st.one_of(st.sampled_from('"\\#{}\n\t/~ é\u2028\x7f\x00'), st.characters(exclude_categories=["Cs"])),
    max_size=12,
)


@given(names=st.lists(NAMES, min_size=1, max_size=8, unique=True), repeats=st.integers(1, 3))
@hypothesis_settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_keys_of_any_text_are_found_again(names: list[str], repeats: int, tmp_path: Path) -> None:
    rows = read_input(write_rows(tmp_path / "in.jsonl", map(row, names)))
    output = tmp_path / "out.jsonl"
    wanted = [(number, repeat) for number in range(len(names)) for repeat in range(repeats)][::2]
    lines = [
        orjson.dumps({"_rb_key": rollout_key(names[number], repeat), "text": "}\n"})
        for number, repeat in wanted
    ]
    output.write_bytes(b"".join(line + b"\n" for line in lines))
    found = find_done(output, rows, repeats)
    assert found.places.tolist() == [number * repeats + repeat for number, repeat in wanted]


def test_lines_come_in_input_order_and_strangers_last(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    rows = [{"id": f"t{i}", "responses_create_params": {"input": "q"}} for i in range(50)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = tmp_path / "out.jsonl"
    lines = [f'{{"_rb_key":"t{i}#{repeat}","text":"{"x" * i}"}}\n' for i in range(50) for repeat in range(2)]
    strangers = ['{"_rb_key":"t3#2"}\n', '{"_rb_key":"stranger#0"}\n']
    shuffled = [*lines, strangers[1]]
    random.Random(1).shuffle(shuffled)
    output.write_text("".join([strangers[0], *shuffled]))
    tasks = read_input(source)
    put_in_order(output, verify(output, tasks, 2))
    assert output.read_text() == "".join([*lines, *strangers])
    before = output.stat().st_ino
    put_in_order(output, verify(output, tasks, 2))
    assert output.stat().st_ino == before  # in order already: nothing is rewritten


def test_nobody_else_gets_at_a_finished_output_before_it_is_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_input(tmp_path, 3)
    config(tmp_path)
    held: list[str] = []

    def try_first(output: Path, found: Found) -> None:
        with pytest.raises(LockedError):
            FileLock(output)
        held.append("ordering")
        put_in_order(output, found)

    def try_before(output: Path, rows: Input, repeats: int) -> Found:
        with pytest.raises(LockedError):
            FileLock(output)
        held.append("checking")
        return verify(output, rows, repeats)

    monkeypatch.setattr(collector, "put_in_order", try_first)
    monkeypatch.setattr(collector, "verify", try_before)
    run(tmp_path, "ordered=true")
    assert held == ["checking", "ordering"]


def shuffled_output(directory: Path) -> tuple[Path, Found]:
    output = directory / "out.jsonl"
    output.write_text("".join(f'{{"_rb_key":"t{number}#0"}}\n' for number in (2, 0, 1)))
    return output, verify(output, read_input(small_input(directory, 3)), 1)


def test_a_private_output_stays_private(tmp_path: Path) -> None:
    output, found = shuffled_output(tmp_path)
    output.chmod(0o600)
    put_in_order(output, found)
    assert keys(output) == ["t0#0", "t1#0", "t2#0"]
    assert output.stat().st_mode & 0o777 == 0o600


def test_an_ordering_that_is_interrupted_leaves_the_old_lines_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, found = shuffled_output(tmp_path)
    before = output.read_bytes()

    def interrupt(*_: object) -> bytes:
        raise Interrupted

    monkeypatch.setattr(os, "pread", interrupt)
    with pytest.raises(Interrupted):
        put_in_order(output, found)
    assert output.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl"}


@pytest.mark.parametrize("torn", [b"", b'{"_rb_key":"t1#0","pa'])
def test_odd_lines_and_one_that_was_being_written(torn: bytes, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    lines = [
        {"_rb_key": f"t{task}#1", "reward": "?" if task == 20 else task / 8, "pad": "x" * task}
        for task in range(2, 50)
    ]
    output.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines) + torn)
    found = find_done(output, read_input(small_input(tmp_path, 50)), 2)
    assert (found.count, found.totals.rewards) == (48, 47)
    assert found.facts == file_facts(output)  # of all bytes, in the pass that read the lines
