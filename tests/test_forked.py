"""Work in a copy of the process: its result, its errors, and its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollbook import forked
from rollbook.forked import InACopy, SharedWork
from supervision import is_gone, poll


def test_the_result_comes_from_another_process() -> None:
    copies = [InACopy(lambda: (os.getpid(), hash("the same seed"), b"x" * 1_000_000)) for _ in range(3)]
    results = [copy.result() for copy in copies]
    assert len({pid for pid, *_ in results} | {os.getpid()}) == 4
    assert {hashed for _, hashed, _ in results} == {hash("the same seed")}
    for pid, *_ in results:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_killed_copy_is_made_up_for_here() -> None:
    here = os.getpid()

    def work() -> int:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return os.getpid()

    assert InACopy(work).result() == here


def test_an_error_is_met_here() -> None:
    def fails() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        InACopy(fails).result()


def test_one_that_is_let_go_of_is_gone() -> None:
    copy = InACopy(lambda: time.sleep(1000))
    pid = copy._pid
    assert pid is not None
    copy.close()
    copy.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_pieces_are_shared_and_come_in_their_order() -> None:
    work = SharedWork(lambda number: (number, os.getpid()), 500, copies=2)
    pids = [copy._pid for copy in work._copies]
    results = work.result()
    assert [number for number, _ in results] == list(range(500))
    assert len(pids) == 2
    assert all(pid and is_gone(pid) for pid in pids)


def test_every_piece_is_done_once_unless_someone_dies(tmp_path: Path) -> None:
    def note(number: int) -> int:
        with (tmp_path / "done").open("ab") as file:
            file.write(b"%d\n" % number)
        return number

    assert SharedWork(note, 200, copies=3).result() == list(range(200))
    assert sorted(map(int, (tmp_path / "done").read_text().split())) == list(range(200))


def test_the_pieces_of_killed_copies_are_done_here() -> None:
    here = os.getpid()

    def work(number: int) -> int:
        if os.getpid() != here and number > 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    assert SharedWork(work, 50, copies=2).result() == list(range(50))


def test_an_error_in_a_piece_is_met_here() -> None:
    def fails(number: int) -> int:
        return 1 // (number - 7)

    with pytest.raises(ZeroDivisionError):
        SharedWork(fails, 20, copies=1).result()


def test_more_pieces_than_tickets() -> None:
    count = 3 * forked._MOST_TICKETS + 5
    assert SharedWork(lambda number: number, count, copies=1).result() == list(range(count))


def test_of_several_errors_it_is_the_first() -> None:
    def fails(number: int) -> int:
        if number % 5 == 3:
            raise ValueError(f"piece {number}")
        return number

    for _ in range(20):
        with pytest.raises(ValueError, match=r"^piece 3$"):
            SharedWork(fails, 40, copies=2).result()


ORPHANS = """
import os, time
from rollbook.forked import InACopy, SharedWork

alone = InACopy(lambda: b"x" * (8 << 20))  # more than fits into its pipe
shared = SharedWork(lambda number: time.sleep(0.05), 4000, copies=1)
print(alone._pid, shared._copies[0]._pid, flush=True)
os._exit(0)
"""


def test_copies_do_not_outlive_their_parent() -> None:
    # Its output is a pipe that the copies have as well: reading it to its end waits for them.
    ended = subprocess.run([sys.executable, "-c", ORPHANS], capture_output=True, text=True, timeout=60)
    pids = [int(pid) for pid in ended.stdout.split()]
    assert len(pids) == 2
    poll(lambda: all(is_gone(pid) for pid in pids))  # their ends of the pipe close a moment before


def test_children_that_someone_else_reaps() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert SharedWork(lambda number: number, 10, copies=2).result() == list(range(10))
        copy = InACopy(lambda: 1)
        time.sleep(0.3)
        assert copy.result() == 1
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_without_room_for_another_process_it_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    before = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(os, "fork", refuse)
    copy = InACopy(os.getpid)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert copy.result() == os.getpid()
    copy.close()
    assert SharedWork(lambda number: number, 10, copies=2).result() == list(range(10))


def test_a_python_without_files_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert InACopy(os.getpid).result() == os.getpid()
