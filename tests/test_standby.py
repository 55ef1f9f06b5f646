"""A process that loads a module beside this one, and waits there for work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from rollbook import forked
from rollbook.forked import Standby
from supervision import is_gone, poll

MODULE = """
import os, signal, time

LOADED_BY = os.getpid()

def where(*given):
    return given, LOADED_BY, os.getpid(), os.environ.get("ONLY_THERE")

def die_unless(here):
    if os.getpid() != here:
        os.kill(os.getpid(), signal.SIGKILL)
    return "made up for"

def fail(text):
    raise ValueError(text)

def share(directory):
    from rollbook.forked import SharedWork

    def note(number):
        open(os.path.join(directory, str(os.getpid())), "w").close()
        time.sleep(60)

    return SharedWork(note, 10, copies=1).result()
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """One that is not loaded yet."""
    name = f"standby_{os.urandom(4).hex()}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(forked, "is_alone", lambda: True)  # whatever threads other tests have left
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    return name


def test_the_module_is_loaded_there_and_the_work_done_there(module: str) -> None:
    standby: Standby[tuple[object, ...]] = Standby(module, "where", {"ONLY_THERE": "yes"})
    big = "x" * 200_000  # more than a pipe holds
    standby.begin(1, big)
    given, loaded_by, done_by, setting = standby.result()
    assert given == (1, big)
    assert loaded_by == done_by != os.getpid()
    assert setting == "yes"
    assert "ONLY_THERE" not in os.environ
    assert module not in sys.modules


def test_without_a_second_core_it_is_done_here(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    standby: Standby[tuple[object, ...]] = Standby(module, "where")
    standby.begin(2)
    assert standby.result()[:3] == ((2,), os.getpid(), os.getpid())


def test_beside_threads_it_is_done_here(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "is_alone", lambda: False)
    standby: Standby[tuple[object, ...]] = Standby(module, "where")
    standby.begin(2)
    assert standby.result()[1] == os.getpid()


def test_a_killed_one_is_made_up_for_here(module: str) -> None:
    standby: Standby[str] = Standby(module, "die_unless")
    standby.begin(os.getpid())
    assert standby.result() == "made up for"


def test_one_that_is_killed_before_it_has_work(module: str) -> None:
    standby: Standby[tuple[object, ...]] = Standby(module, "where")
    assert standby._copy is not None
    assert standby._copy._pid is not None
    os.kill(standby._copy._pid, signal.SIGKILL)
    poll(lambda: is_gone(standby._copy._pid))  # type: ignore[union-attr, arg-type]
    standby.begin("x" * 200_000)
    assert standby.result()[2] == os.getpid()


def test_an_error_is_met_here(module: str) -> None:
    standby: Standby[None] = Standby(module, "fail")
    standby.begin("no")
    with pytest.raises(ValueError, match="no"):
        standby.result()


def test_one_that_is_let_go_of_without_work_is_gone(module: str) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    standby: Standby[None] = Standby(module, "where")
    assert standby._copy is not None
    pid = standby._copy._pid
    standby.close()
    standby.close()
    assert pid is not None
    assert is_gone(pid)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("how", ["waits", "shares"])
def test_it_does_not_outlive_its_parent(how: str, module: str, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    begun.mkdir()
    code = f"""
        import os, sys, time
        sys.path.insert(0, {str(tmp_path)!r})
        from rollbook import forked
        forked.cores = lambda: 2
        standby = forked.Standby({module!r}, "share")
        print(standby._copy._pid, flush=True)
        if {how!r} == "shares":
            standby.begin({str(begun)!r})
            while len(os.listdir({str(begun)!r})) < 2:
                time.sleep(0.02)
        os._exit(0)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=True
    )
    pids = {int(ended.stdout), *(int(path.name) for path in begun.iterdir())}
    assert len(pids) == (2 if how == "shares" else 1)
    poll(lambda: all(is_gone(pid) for pid in pids))
