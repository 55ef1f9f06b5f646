"""Work in a copy of the process: its result, its errors, and its end."""

from __future__ import annotations

import os
import signal
import time

import pytest

from rollbook.forked import InACopy


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
