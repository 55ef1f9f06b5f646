"""A directory is complete or absent, whatever kills its writer and however many write it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rollbook.errors import LockedError, WriteError
from rollbook.records.complete import (
    COMPLETE,
    complete_directory,
    complete_files,
    is_complete,
    make_once,
    problem,
    read_mark,
    remove_unfinished,
    unfinished_path,
)


def make(target: Path, content: str = "weights") -> None:
    with complete_directory(target) as aside:
        (aside / "sub").mkdir()
        (aside / "weights.bin").write_text(content)
        (aside / "sub/state.json").write_text("{}")


def test_it_appears_whole_with_sizes_and_digests(tmp_path: Path) -> None:
    target = tmp_path / "new/step1"
    with complete_directory(target) as aside:
        (aside / "weights.bin").write_text("abc")
        assert not target.exists()
        assert not is_complete(target)
    assert is_complete(target, verify=True)
    mark = read_mark(target)
    assert mark.files["weights.bin"].xxh3_128 == "06b05ab6733a618578af5f94892f3950"  # of "abc", as published
    assert {name: facts.bytes for name, facts in mark.files.items()} == {"weights.bin": 3}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new"]
    assert [path.name for path in target.parent.iterdir()] == ["step1"]


def test_an_exception_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="halfway"), complete_directory(tmp_path / "step1") as aside:
        (aside / "weights.bin").write_text("abc")
        raise ValueError("halfway")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_changed_or_short_file_is_named(tmp_path: Path) -> None:
    target = tmp_path / "step1"
    make(target)
    (target / "notes.txt").write_text("added later")
    assert problem(target, verify=True) is None
    (target / "weights.bin").write_text("WEIGHTS")
    assert problem(target) is None
    assert "weights.bin was changed" in (problem(target, verify=True) or "")
    (target / "weights.bin").write_text("weigh")
    assert "has 5 bytes instead of 7" in (problem(target) or "")
    (target / "sub/state.json").unlink()
    (target / "weights.bin").write_text("weights")
    assert "state.json is missing" in (problem(target) or "")


@pytest.mark.parametrize("mark", ["", "2026-11-16T09:30:00.123456Z\n"])
def test_marks_of_older_versions_count(tmp_path: Path, mark: str) -> None:
    (tmp_path / COMPLETE).write_text(mark)
    assert is_complete(tmp_path, verify=True)
    assert read_mark(tmp_path).completed_at == (mark.strip() or None)


def test_a_finished_directory_is_not_replaced(tmp_path: Path) -> None:
    make(tmp_path / "step1")
    with pytest.raises(WriteError, match="exists already"):
        make(tmp_path / "step1", "other")
    assert (tmp_path / "step1/weights.bin").read_text() == "weights"


def test_an_old_directory_is_displaced_only_when_the_new_one_is_finished(tmp_path: Path) -> None:
    target = tmp_path / "step1"
    make(target)
    with (
        pytest.raises(ValueError),
        complete_directory(target, displace=lambda old: old.rename(tmp_path / "old")),
    ):
        raise ValueError
    assert is_complete(target, verify=True)
    with complete_directory(target, displace=lambda old: old.rename(tmp_path / "old")) as aside:
        (aside / "weights.bin").write_text("new")
    assert (tmp_path / "old/weights.bin").read_text() == "weights"
    assert (target / "weights.bin").read_text() == "new"


def test_a_second_writer_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    with (
        complete_directory(tmp_path / "step1"),
        pytest.raises(LockedError, match=f"pid {os.getpid()}"),
        complete_directory(tmp_path / "step1"),
    ):
        pass


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(WriteError, match=r"No space left.*bytes are free"):
        # into a directory that is there: making one needs the disk too
        make(tmp_path / "step1")
    assert list(tmp_path.iterdir()) == []


WRITER = """
import os, signal, sys
from pathlib import Path
from rollbook.records.complete import complete_directory
with complete_directory(Path(sys.argv[1])) as aside:
    (aside / "weights.bin").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_writer_left_is_cleared(tmp_path: Path) -> None:
    target = tmp_path / "step1"
    killed = subprocess.run([sys.executable, "-c", WRITER, str(target)])
    assert killed.returncode == -signal.SIGKILL
    assert unfinished_path(target).exists() and not target.exists()
    with complete_directory(tmp_path / "step2"):
        assert remove_unfinished(tmp_path) == [unfinished_path(target)]
    assert not unfinished_path(target).exists()
    assert is_complete(tmp_path / "step2")

    subprocess.run([sys.executable, "-c", WRITER, str(target)])
    make(target)
    assert is_complete(target, verify=True)


MAKER = """
import sys, time
from pathlib import Path
from rollbook.records.complete import make_once
target, log = Path(sys.argv[1]), Path(sys.argv[2])
def make(directory):
    with log.open("a") as file:
        file.write("made\\n")
    for name in "abc":
        (directory / name).write_text(name * 1000)
        time.sleep(0.05)
make_once(target, make, on_wait=lambda who: print(who, flush=True))
assert sorted(path.name for path in target.iterdir()) == ["COMPLETE", "a", "b", "c"]
"""


def test_of_several_makers_one_makes_and_all_use_it(tmp_path: Path) -> None:
    target, log = tmp_path / "cache", tmp_path / "log"
    command = [sys.executable, "-c", MAKER, str(target), str(log)]
    makers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    said = [maker.communicate(timeout=60)[0] for maker in makers]
    assert [maker.returncode for maker in makers] == [0] * 4
    assert log.read_text() == "made\n"
    assert all("is being written by another process (pid" in text for text in said if text)
    assert is_complete(target, verify=True)


def test_a_maker_in_another_thread_is_waited_for(tmp_path: Path) -> None:
    target = tmp_path / "cache"
    made, waits, entered = [], threading.Event(), threading.Event()

    def slow(directory: Path) -> None:
        made.append("first")
        entered.set()
        assert waits.wait(60)
        (directory / "data").write_text("1")

    first = threading.Thread(target=make_once, args=(target, slow))
    first.start()
    assert entered.wait(60)
    make_once(target, lambda directory: made.append("second"), on_wait=lambda who: waits.set())
    first.join()
    assert made == ["first"]
    assert (target / "data").read_text() == "1"


def test_one_that_is_no_use_is_made_again(tmp_path: Path) -> None:
    target = tmp_path / "cache"
    target.mkdir()
    (target / COMPLETE).touch()  # marked, but its data is gone: what a crash of an older version left

    def has_data(directory: Path) -> bool:
        return is_complete(directory) and (directory / "data").exists()

    make_once(target, lambda directory: (directory / "data").touch(), is_usable=has_data)
    assert has_data(target)
    make_once(target, lambda directory: pytest.fail("it is there"), is_usable=has_data)
    (target / "data").unlink()
    with pytest.raises(ValueError):
        make_once(target, lambda directory: raise_error(), is_usable=has_data)
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def raise_error() -> None:
    raise ValueError


def write_two(directory: Path, text: str, *, overwrite: bool = False) -> None:
    targets = directory / "main.txt", directory / "extra.txt"
    with complete_files(*targets, overwrite=overwrite) as asides:
        for target, aside in zip(targets, asides, strict=True):
            (aside / "scratch").mkdir()
            (aside / "scratch/run").write_text("no file of the user's")
            (aside / f"{target.stem}.about").write_text(f"about {text}")
            (aside / target.name).write_text(text)


def contents(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(directory.iterdir()) if path.is_file()}


NAMES = ("extra.about", "extra.txt", "main.about", "main.txt")


def both(text: str) -> dict[str, str]:
    return {name: f"about {text}" if name.endswith("about") else text for name in NAMES}


def test_files_appear_together(tmp_path: Path) -> None:
    write_two(tmp_path, "one")
    assert contents(tmp_path) == both("one")
    with pytest.raises(WriteError, match=r"main\.txt exists already"):
        write_two(tmp_path, "two")
    write_two(tmp_path, "two", overwrite=True)
    assert contents(tmp_path) == both("two")
    assert sorted(path.name for path in tmp_path.iterdir()) == list(NAMES)


def test_nothing_appears_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError), complete_files(tmp_path / "main.txt") as (aside,):
        (aside / "main.txt").write_text("one")
        raise ValueError
    assert list(tmp_path.iterdir()) == []


def test_files_appear_where_a_disk_has_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    write_two(tmp_path, "one")
    write_two(tmp_path, "two", overwrite=True)
    assert contents(tmp_path) == both("two")
    with (
        pytest.raises(WriteError, match="exists already"),
        complete_files(tmp_path / "new.txt") as (aside,),
    ):
        (aside / "new.txt").write_text("ours")
        (tmp_path / "new.txt").write_text("somebody else's")
    assert (tmp_path / "new.txt").read_text() == "somebody else's"


KILLED_WHILE_NAMING = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_complete
left, link = int(sys.argv[3]), Path.hardlink_to
def link_or_die(self, target):
    global left
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    link(self, target)
Path.hardlink_to = link_or_die
test_complete.write_two(Path(sys.argv[2]), "new", overwrite=sys.argv[4] == "True")
"""


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("links", range(8))
def test_a_kill_between_two_names_leaves_all_or_nothing_to_the_next(
    tmp_path: Path, links: int, overwrite: bool
) -> None:
    if overwrite:
        write_two(tmp_path, "old")
    before = contents(tmp_path)
    words = [str(Path(__file__).parent), str(tmp_path), str(links), str(overwrite)]
    subprocess.run([sys.executable, "-c", KILLED_WHILE_NAMING, *words], check=False)
    with (
        pytest.raises(ValueError),
        complete_files(tmp_path / "main.txt", tmp_path / "extra.txt", overwrite=True),
    ):
        raise ValueError  # whatever becomes of the next one, it begins by clearing up
    assert contents(tmp_path) in (before, both("new"))
    assert sorted(path.name for path in tmp_path.iterdir()) in ([], list(NAMES))
