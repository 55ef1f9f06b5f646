"""A large input is checked by several processes: the same rows, ids and line numbers as by one."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from rollbook.collect import input_check
from rollbook.collect.input_check import InputCheck, Part, check_part
from rollbook.errors import UsageError
from rollbook.records.row_blocks import line_parts
from supervision import is_gone

NAMED = b'{"id":"%d","responses_create_params":{"input":"q %d"}}'
UNNAMED = b'{"answer":%d,"responses_create_params":{"input":[{"role":"user","content":"q %d"}]}}'
BAD = b'{"id":"%d","responses_create_params":{"output":"%d"}}'


def by_several(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(input_check, "_PART_BYTES", 200)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)))


def checked(path: Path) -> list[list[int]] | str:
    try:
        return [found.tolist() for found in InputCheck(path, None).result()]
    except UsageError as error:
        return str(error)


@hypothesis_settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    lines=st.lists(st.sampled_from([NAMED, NAMED, NAMED, UNNAMED, BAD, b"", b"  ", b"not %d %d"])),
    has_last_newline=st.booleans(),
    processes=st.integers(2, 4),
)
def test_parts_find_what_one_pass_finds(
    lines: list[bytes], has_last_newline: bool, processes: int, tmp_path: Path
) -> None:
    path = tmp_path / "in.jsonl"
    whole = [line % (number, number) if b"%" in line else line for number, line in enumerate(lines)]
    path.write_bytes(b"\n".join(whole) + (b"\n" if has_last_newline else b""))
    alone = checked(path)
    with pytest.MonkeyPatch.context() as monkeypatch:
        by_several(monkeypatch, processes)
        assert checked(path) == alone


def test_a_bad_row_in_every_part_is_named_by_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [(BAD if number in (3, 40, 97) else NAMED) % (number, number) for number in range(100)]
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    by_several(monkeypatch, 3)
    message = checked(path)
    assert isinstance(message, str)
    assert "3 rows" in message
    for number in (4, 41, 98):
        assert f"in.jsonl:{number}: it has no required field `input`" in message


def test_a_part_whose_process_is_killed_is_checked_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"".join(NAMED % (number, number) + b"\n" for number in range(100)))
    alone = checked(path)
    here = os.getpid()
    done_here: list[int] = []

    def check_or_die(path: Path, start: int = 0, *rest: Any) -> Part:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        done_here.append(start)
        return check_part(path, start, *rest)

    monkeypatch.setattr(input_check, "check_part", check_or_die)
    by_several(monkeypatch, 3)
    assert checked(path) == alone
    parts = line_parts(path, 200)
    assert len(parts) > 3
    assert sorted(done_here) == [start for start, _ in parts]


def test_a_check_that_nobody_waits_for_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"".join(NAMED % (number, number) + b"\n" for number in range(100)))
    monkeypatch.setattr(input_check, "check_part", lambda *_: time.sleep(60))
    by_several(monkeypatch, 3)
    check = InputCheck(path, None)
    pids = [copy._pid for copy in check._work._copies]
    check.close()
    check.close()
    assert len(pids) == 2
    assert all(pid and is_gone(pid) for pid in pids)


def test_a_limit_reads_no_further_than_it_must(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(
        b"".join(NAMED % (number, number) + b"\n" for number in range(10)) + b"never looked at\n"
    )
    by_several(monkeypatch, 2)
    starts, hashes = InputCheck(path, 10).result()
    assert len(starts) == len(hashes) == 10
