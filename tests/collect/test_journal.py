"""The output is the truth, the journal a shortcut: with any journal or none, the same is done."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from collecting import config, keys, row, run, small_input, write_rows
from rollbook.collect import output_scan
from rollbook.collect.done import find_done
from rollbook.collect.journal import Done, Entry, Journal
from rollbook.collect.plan import Plan
from rollbook.errors import BadLineError
from rollbook.records.row_keys import key_of


class Files:
    """An output of ten rows, and its journal."""

    def __init__(self, directory: Path) -> None:
        self.output = directory / "out.jsonl"
        self.journal = directory / "out_journal.bin"
        self.plan = Plan(small_input(directory, 10), limit=None, repeats=1)
        config(directory)
        run(directory)

    def find(self, *, same_input: bool = True) -> Done:
        return find_done(self.output, self.journal, self.plan, same_input=same_input)

    def scan(self) -> Done:
        return self.find(same_input=False)

    def lines(self) -> list[bytes]:
        return self.output.read_bytes().splitlines(keepends=True)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def test_a_scan_of_prefixes_finds_what_the_journal_says(files: Files) -> None:
    by_journal, by_scan = files.find(), files.scan()
    assert by_journal.entries.tolist() == by_scan.entries.tolist()
    assert len(files.journal.read_bytes()) == 32 * 10
    assert by_journal.count == 10


SPOILED: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "torn": lambda data: data[:-7],
    "behind": lambda data: data[: 32 * 4],
    "zeros": lambda data: bytes(len(data)),
    "zeros at the end": lambda data: data[:128] + bytes(len(data) - 128),
    "of another file": lambda data: data[32:] + data[:32],
    "noise": lambda data: bytes((number * 37) % 251 for number in range(len(data))),
    "longer than the file": lambda data: data + b"\1\0\0\0\0\0\0\0" + (10**9).to_bytes(24, "little"),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_a_spoiled_journal_changes_nothing(files: Files, spoil: Callable[[bytes], bytes]) -> None:
    files.journal.write_bytes(spoil(files.journal.read_bytes()))
    assert files.find().entries.tolist() == files.scan().entries.tolist()


def test_without_a_journal(files: Files) -> None:
    files.journal.unlink()
    assert files.find().count == 10


@pytest.mark.parametrize("number", [0, 4, 9])
def test_a_line_taken_out_is_missed_though_the_journal_knows_it(files: Files, number: int) -> None:
    lines = files.lines()
    gone = orjson.loads(lines.pop(number))["_ng_task_index"]
    files.output.write_bytes(b"".join(lines))
    assert [row for row in range(10) if not files.find().flags[row, 0]] == [gone]


def test_lines_of_the_same_length_do_not_deceive(tmp_path: Path) -> None:
    plan = Plan(small_input(tmp_path, 10), limit=None, repeats=1)
    lines = [b'{"_rb_key":"t%d#0","reward":1.0}\n' % number for number in range(10)]
    output = tmp_path / "out.jsonl"
    output.write_bytes(b"".join(lines))
    Journal(
        tmp_path / "journal", find_done(output, tmp_path / "none", plan, same_input=False).entries
    ).close()
    output.write_bytes(b"".join(lines[:3] + lines[4:]))
    done = find_done(output, tmp_path / "journal", plan, same_input=True)
    assert done.flags[:, 0].tolist() == [number != 3 for number in range(10)]


def test_a_smaller_limit_in_between_makes_nobody_forget_what_is_done(tmp_path: Path) -> None:
    small_input(tmp_path, 10)
    config(tmp_path)
    run(tmp_path, "limit=8")
    (tmp_path / "out_journal.bin").unlink()  # as if killed before it was written
    said: list[str] = []
    assert run(tmp_path, "limit=2", "num_repeats=2", said=said).done == 4
    assert said == [f"6 lines of {tmp_path / 'out.jsonl'} belong to no planned rollout; they stay"]
    assert run(tmp_path).done_before == 8
    assert len(keys(tmp_path / "out.jsonl")) == len(set(keys(tmp_path / "out.jsonl"))) == 12


def test_a_full_disk_shortens_the_journal_and_leaves_no_gap(files: Files) -> None:
    entries = files.find().entries
    journal = Journal(files.journal, entries[:4])
    real = journal._descriptor
    with Path("/dev/full").open("wb") as full:
        journal._descriptor = full.fileno()
        journal.append([Entry(*entry) for entry in entries[4:6].tolist()])
        journal._descriptor = real
    journal.append([Entry(*entry) for entry in entries[6:].tolist()])
    journal.close()
    assert files.journal.stat().st_size == 32 * 4
    assert files.find().count == 10


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
    files.journal.unlink()
    with pytest.raises(BadLineError, match=rf"out\.jsonl:6: .*{why}"):
        files.find()


@pytest.mark.parametrize("blank", [b"\n", b"  \t\r\n", b"\n\n\n"])
@pytest.mark.parametrize("place", [0, 5, 9, 10])
def test_blank_lines_are_no_lines(files: Files, blank: bytes, place: int) -> None:
    lines = files.lines()
    files.output.write_bytes(b"".join([*lines[:place], blank, *lines[place:]]))
    found = files.find()
    assert (found.count, found.unknown) == (10, 0)
    Journal(files.journal, found.entries).close()
    files.output.write_bytes(files.output.read_bytes() + blank)
    assert files.find().count == 10
    files.output.write_bytes(b"".join(lines[1:]))
    assert files.find().count == 9


def test_a_record_inside_a_record_is_none_of_the_scans_business(files: Files) -> None:
    lines = files.lines()
    inner = orjson.loads(lines[0])
    lines[1] = orjson.dumps({**orjson.loads(lines[1]), "rejected": inner, "text": lines[0].decode()}) + b"\n"
    files.output.write_bytes(b"".join(lines))
    assert files.scan().count == 10


def test_a_key_on_two_lines_names_both(files: Files) -> None:
    lines = files.lines()
    files.output.write_bytes(b"".join([*lines, lines[3]]))
    for same_input in (True, False):
        with pytest.raises(BadLineError, match=r"out\.jsonl:11: the same key stands on line 4 already"):
            files.find(same_input=same_input)


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
    plan = Plan(tmp_path / "in.jsonl", limit=None, repeats=1)
    assert find_done(output, tmp_path / "none", plan, same_input=False).count == 2


@pytest.mark.parametrize("torn", [b"", b'{"_rb_key":"t1#0","pa'])
@pytest.mark.parametrize("others", [0, 2])
def test_parts_of_a_large_output_find_what_one_pass_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torn: bytes, others: int
) -> None:
    """With an odd line in between (a reward that is text), and one that was being written at its end."""
    plan = Plan(small_input(tmp_path, 50), limit=None, repeats=2)
    output = tmp_path / "out.jsonl"
    rows = [
        {"_rb_key": f"t{task}#1", "reward": "?" if task == 20 else task / 8, "pad": "x" * task}
        for task in range(2, 50)
    ]
    output.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows) + torn)
    alone = find_done(output, tmp_path / "none", plan, same_input=False)
    assert alone.count == 48
    monkeypatch.setattr(output_scan, "_PART_BYTES", 100)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(1 + others)))
    shared = find_done(output, tmp_path / "none", plan, same_input=False)
    assert shared.entries.tobytes() == alone.entries.tobytes()


def test_a_bad_line_in_any_part_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(small_input(tmp_path, 50), limit=None, repeats=1)
    lines = [b'{"_rb_key":"t%d#0"}\n' % task for task in range(50)]
    lines[37] = b'{"no": "key"}\n'
    (tmp_path / "out.jsonl").write_bytes(b"".join(lines))
    monkeypatch.setattr(output_scan, "_PART_BYTES", 100)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    with pytest.raises(BadLineError, match=r"out\.jsonl:38"):
        find_done(tmp_path / "out.jsonl", tmp_path / "none", plan, same_input=False)


NAMES = st.text(
    st.one_of(st.sampled_from('"\\#{}\n\t/~ é\u2028\x7f\x00'), st.characters(exclude_categories=["Cs"])),
    max_size=12,
)


@given(names=st.lists(NAMES, min_size=1, max_size=8, unique=True), repeats=st.integers(1, 3))
@hypothesis_settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_keys_of_any_text_are_found_again(names: list[str], repeats: int, tmp_path: Path) -> None:
    plan = Plan(write_rows(tmp_path / "in.jsonl", map(row, names)), limit=None, repeats=repeats)
    output, journal = tmp_path / "out.jsonl", tmp_path / "journal"
    wanted = [(number, repeat) for number in range(len(names)) for repeat in range(repeats)][::2]
    lines = [
        orjson.dumps({"_rb_key": key_of(names[number], repeat), "text": "}\n"}) for number, repeat in wanted
    ]
    output.write_bytes(b"".join(line + b"\n" for line in lines))
    scanned = find_done(output, journal, plan, same_input=False)
    assert [(row, repeat) for row, repeat, *_ in scanned.entries.tolist()] == wanted
    Journal(journal, scanned.entries[:-1]).close()
    assert find_done(output, journal, plan, same_input=True).entries.tobytes() == scanned.entries.tobytes()
    journal.unlink()
