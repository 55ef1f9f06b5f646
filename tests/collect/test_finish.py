"""The finished output: complete, in input order, every line as it was."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from collecting import config, keys, run, small_input
from rollbook.collect import finish
from rollbook.collect.finish import put_in_order, verify
from rollbook.collect.journal import Done
from rollbook.collect.paths import CollectionFiles
from rollbook.collect.plan import Plan
from rollbook.errors import Interrupted, LockedError
from rollbook.records.locks import FileLock


def test_lines_come_in_input_order_and_strangers_last(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    rows = [{"id": f"t{i}", "responses_create_params": {"input": "q"}} for i in range(50)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = CollectionFiles(tmp_path / "out.jsonl")
    lines = [f'{{"_rb_key":"t{i}#{repeat}","text":"{"x" * i}"}}\n' for i in range(50) for repeat in range(2)]
    strangers = ['{"_rb_key":"t3#2"}\n', '{"_rb_key":"stranger#0"}\n']
    shuffled = [*lines, strangers[1]]
    random.Random(1).shuffle(shuffled)
    files.output.write_text("".join([strangers[0], *shuffled]))
    files.journal.write_bytes(b"old")
    plan = Plan(source, limit=None, repeats=2)
    put_in_order(files, verify(files, plan))
    assert files.output.read_text() == "".join([*lines, *strangers])
    assert not files.journal.exists()
    before = files.output.stat().st_ino
    put_in_order(files, verify(files, plan))
    assert files.output.stat().st_ino == before  # in order already: nothing is rewritten


def test_nobody_else_gets_at_a_finished_output_before_it_is_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_input(tmp_path, 3)
    config(tmp_path)
    held: list[str] = []

    def try_first(files: CollectionFiles, done: Done) -> None:
        with pytest.raises(LockedError):
            FileLock(files.output)
        held.append("ordering")
        put_in_order(files, done)

    def try_before(files: CollectionFiles, plan: Plan) -> Done:
        with pytest.raises(LockedError):
            FileLock(files.output)
        held.append("checking")
        return verify(files, plan)

    monkeypatch.setattr(finish, "put_in_order", try_first)
    monkeypatch.setattr(finish, "verify", try_before)
    run(tmp_path, "ordered=true")
    assert held == ["checking", "ordering"]


def shuffled_output(directory: Path) -> tuple[CollectionFiles, Done]:
    files = CollectionFiles(directory / "out.jsonl")
    files.output.write_text("".join(f'{{"_rb_key":"t{number}#0"}}\n' for number in (2, 0, 1)))
    return files, verify(files, Plan(small_input(directory, 3), limit=None, repeats=1))


def test_a_private_output_stays_private(tmp_path: Path) -> None:
    files, done = shuffled_output(tmp_path)
    files.output.chmod(0o600)
    put_in_order(files, done)
    assert keys(files.output) == ["t0#0", "t1#0", "t2#0"]
    assert files.output.stat().st_mode & 0o777 == 0o600


def test_an_ordering_that_is_interrupted_leaves_the_old_lines_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, done = shuffled_output(tmp_path)
    before = files.output.read_bytes()

    def interrupt(*_: object) -> bytes:
        raise Interrupted

    monkeypatch.setattr(os, "pread", interrupt)
    with pytest.raises(Interrupted):
        put_in_order(files, done)
    assert files.output.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl"}
