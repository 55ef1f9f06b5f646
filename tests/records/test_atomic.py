"""A whole file is old or new, never in between: after a kill, on a full disk, under a reader's eyes."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rollbook.errors import WriteError
from rollbook.records.atomic import (
    fsync_directory,
    make_directory,
    remove_leftovers,
    replacing,
    write_atomic,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.json"


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def fail(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_file_is_made_and_replaced(path: Path) -> None:
    write_atomic(path, b"old")
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert names(path.parent) == ["run.json"]


def test_missing_directories_are_made(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a" / "b" / "run.json", b"new")
    assert (tmp_path / "a" / "b" / "run.json").read_bytes() == b"new"


def test_a_replaced_file_keeps_its_mode(path: Path) -> None:
    for mode in (0o600, 0o640, 0o664, 0o755):
        path.write_bytes(b"old")
        path.chmod(mode)
        write_atomic(path, b"new")
        assert mode_of(path) == mode


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_a_new_file_obeys_the_umask(path: Path, umask: int, mode: int) -> None:
    previous = os.umask(umask)
    try:
        write_atomic(path, b"new")
    finally:
        os.umask(previous)
    assert mode_of(path) == mode


def test_the_umask_of_other_threads_is_left_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "umask", fail)  # it belongs to the whole process
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"


def test_a_private_file_is_private_before_it_has_content(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(b"old")
    path.chmod(0o600)
    modes: list[tuple[int, int]] = []
    real = os.fchmod

    def fchmod(descriptor: int, mode: int) -> None:
        real(descriptor, mode)
        modes.append((mode, os.fstat(descriptor).st_size))

    monkeypatch.setattr(os, "fchmod", fchmod)
    write_atomic(path, b"secret")
    assert modes == [(0o600, 0)]


def test_a_symlink_that_a_user_named_keeps_pointing(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    real, link = tmp_path / "there" / "real.json", tmp_path / "link.json"
    link.symlink_to(real)
    for content in (b"made", b"replaced"):  # a dangling link first
        with replacing(link, follow_links=True) as file:
            file.write(content)
        assert link.is_symlink()
        assert real.read_bytes() == content
    assert names(tmp_path) == ["link.json", "there"]
    assert names(tmp_path / "there") == ["real.json"]


@pytest.mark.parametrize("step", ["fsync", "fchmod", "replace"])
def test_a_failure_leaves_the_old_content_and_nothing_else(
    path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path.write_bytes(b"old")
    monkeypatch.setattr(Path if step == "replace" else os, step, fail)
    with pytest.raises(WriteError, match=r"run\.json: not written \(No space left.*previous content"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert names(path.parent) == ["run.json"]


def test_an_interrupt_leaves_the_old_content_and_nothing_else(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert names(path.parent) == ["run.json"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match=r"file/run\.json: cannot write here"):
        write_atomic(tmp_path / "file" / "run.json", b"new")
    (tmp_path / "folder").mkdir()
    with pytest.raises(WriteError, match=r"folder: not written"):
        write_atomic(tmp_path / "folder", b"new")
    assert names(tmp_path) == ["file", "folder"]


def test_a_name_that_is_not_confirmed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(WriteError, match="the disk did not confirm a new name here"):
        fsync_directory(tmp_path)
    with pytest.raises(WriteError, match="the disk did not confirm"):
        make_directory(tmp_path / "new")
    make_directory(tmp_path)


def test_the_data_is_synced_before_the_name_and_the_name_before_returning(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    real_fsync, real_replace = os.fsync, Path.replace

    def fsync(descriptor: int) -> None:
        steps.append("directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "data")
        real_fsync(descriptor)

    def replace(self: Path, target: Path) -> Path:
        steps.append("rename")
        return real_replace(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    write_atomic(path, b"new")
    assert steps == ["data", "rename", "directory"]


def test_what_need_not_be_durable_spares_the_disk_and_is_still_whole(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", fail)
    write_atomic(path, b"new", durable=False)
    assert path.read_bytes() == b"new"
    with monkeypatch.context() as patch, pytest.raises(WriteError, match="previous content is untouched"):
        patch.setattr(Path, "replace", fail)
        write_atomic(path, b"newer", durable=False)
    assert path.read_bytes() == b"new"
    assert names(path.parent) == ["run.json"]


VICTIM = """
import os, signal, sys
from pathlib import Path
from rollbook.records.atomic import write_atomic

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

path, step = Path(sys.argv[1]), sys.argv[2]
if step == "data":
    os.fsync = die
elif step == "rename":
    Path.replace = die
elif step == "directory":
    real = os.fsync
    os.fsync = lambda fd: real(fd) if os.fstat(fd).st_size == 1_000_000 else die()
write_atomic(path, b"n" * 1_000_000)
"""


@pytest.mark.parametrize(
    ("step", "survives"), [("data", b"old"), ("rename", b"old"), ("directory", b"n" * 1_000_000)]
)
def test_a_kill_leaves_old_or_new(path: Path, step: str, survives: bytes) -> None:
    path.write_bytes(b"old")
    killed = subprocess.run([sys.executable, "-c", VICTIM, str(path), step], timeout=60, check=False)
    assert killed.returncode == -9
    assert path.read_bytes() == survives
    visible = [name for name in names(path.parent) if not name.startswith(".")]
    assert visible == ["run.json"], "what a kill leaves behind is hidden"
    write_atomic(path, b"next")
    assert path.read_bytes() == b"next"
    for kept in (".hidden", ".run.json.lock", ".mine.tmp", "a.0123456789ab.tmp"):
        path.with_name(kept).touch()
    remove_leftovers(path.parent)
    assert names(path.parent) == [".hidden", ".mine.tmp", ".run.json.lock", "a.0123456789ab.tmp", "run.json"]


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_a_file_that_is_not_written_to_its_end_leaves_the_old_one_and_nothing_else(
    path: Path, error: BaseException
) -> None:
    path.write_bytes(b"old")
    with pytest.raises(type(error)), replacing(path) as file:
        file.write(b"new")
        raise error
    assert path.read_bytes() == b"old"
    assert names(path.parent) == ["run.json"]


def test_whoever_holds_the_lock_removes_what_a_kill_left_of_that_file_alone(path: Path) -> None:
    leftovers = [".run.json.0123456789ab.tmp", ".other.json.0123456789ab.tmp", ".a.run.json.0123456789ab.tmp"]
    for name in leftovers:
        path.with_name(name).touch()
    with replacing(path, is_locked=True) as file:
        file.write(b"new")
    assert names(path.parent) == sorted([*leftovers[1:], "run.json"])


def test_a_directory_below_a_file_is_refused_in_words(path: Path) -> None:
    path.write_bytes(b"old")
    with pytest.raises(WriteError, match="Not a directory"):
        write_atomic(path / "below" / "run.json", b"new")


def test_a_reader_never_sees_a_half_written_file(path: Path) -> None:
    write_atomic(path, b"0" * 50_000)
    stop = threading.Event()
    contents: set[bytes] = set()

    def read() -> None:
        while not stop.is_set():
            contents.add(path.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    for digit in range(40):
        write_atomic(path, str(digit % 10).encode() * 50_000)
    stop.set()
    reader.join()
    assert contents
    assert all(len(content) == 50_000 and len(set(content)) == 1 for content in contents)
