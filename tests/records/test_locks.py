"""One writer a file: the second is told who the first is, and a dead one blocks nobody."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollbook.errors import LockedError, WriteError
from rollbook.records.jsonl import JsonlWriter, read_lines
from rollbook.records.locks import FileLock, lock_path

PATIENCE = 60


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.jsonl"


OWNER = """
import os, sys
from rollbook.records.jsonl import JsonlWriter
writer = JsonlWriter(sys.argv[1])
child = 0
if "fork" in sys.argv:
    reader, writer_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer_end, b"born")
        sys.stdin.read()
        os._exit(0)
    os.read(reader, 4)
print(child, flush=True)
if sys.stdin.readline() == "close\\n":
    writer.close()
"""


class Owner:
    """Another process that holds the file."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        self.forked = int(process.stdout.readline())

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("close\n")
        self.process.stdin.close()
        assert self.process.wait(PATIENCE) == 0


@contextmanager
def owner_of(path: Path, *options: str) -> Iterator[Owner]:
    command = [sys.executable, "-c", OWNER, str(path), *options]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Owner(process)
        finally:
            process.kill()


def open_elsewhere(path: Path) -> str:
    """What another process is told when it opens the file: nothing, or an error."""
    code = (
        "import sys; from rollbook.records.jsonl import JsonlWriter\n"
        "JsonlWriter(sys.argv[1], follow_links=True).close()"
    )
    command = [sys.executable, "-c", code, str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False).stderr


def test_a_second_writer_of_this_process_is_refused(path: Path) -> None:
    with JsonlWriter(path), pytest.raises(LockedError) as caught:
        JsonlWriter(path)
    message = str(caught.value)
    assert message.startswith(f"{path} is being written by this process")
    assert f"pid {os.getpid()}, host {socket.gethostname()}" in message
    JsonlWriter(path).close()


def test_a_writer_of_another_process_is_named(path: Path) -> None:
    with owner_of(path) as owner:
        with pytest.raises(LockedError) as caught:
            JsonlWriter(path)
        message = str(caught.value)
        assert f"{path} is being written by another process" in message
        assert f"pid {owner.pid}, host {socket.gethostname()}" in message
        assert "wait for it or stop it" in message
        owner.close()
        JsonlWriter(path).close()


def test_another_process_is_refused_while_this_one_writes(path: Path) -> None:
    with JsonlWriter(path):
        told = open_elsewhere(path)
        assert "LockedError" in told
        assert f"pid {os.getpid()}, host {socket.gethostname()}" in told
    assert open_elsewhere(path) == ""


def test_a_refused_attempt_does_not_drop_the_lock(path: Path) -> None:
    with JsonlWriter(path):
        for _ in range(3):
            with pytest.raises(LockedError):
                JsonlWriter(path)
        assert "LockedError" in open_elsewhere(path)


def test_reading_the_sidecar_does_not_drop_the_lock(path: Path, tmp_path: Path) -> None:
    """As a copy or an upload of the run directory by the training process itself does."""
    with JsonlWriter(path):
        shutil.copytree(tmp_path, tmp_path.with_name("copy"))
        lock_path(path).read_bytes()
        assert "LockedError" in open_elsewhere(path)
    shutil.rmtree(tmp_path.with_name("copy"))


def test_a_link_leads_to_the_same_lock(path: Path, tmp_path: Path) -> None:
    (tmp_path / "link.jsonl").symlink_to("log.jsonl")
    (tmp_path / "other").symlink_to(tmp_path)
    with JsonlWriter(path):
        for way in (tmp_path / "link.jsonl", tmp_path / "other" / "log.jsonl"):
            with pytest.raises(LockedError):
                JsonlWriter(way, follow_links=True)
            assert "LockedError" in open_elsewhere(way)


def test_a_relative_path_leads_to_the_same_lock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    with JsonlWriter(path), pytest.raises(LockedError):
        JsonlWriter("log.jsonl")


def status_of_child(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_is_refused(path: Path) -> None:
    with JsonlWriter(path):
        child = os.fork()
        if child == 0:
            try:
                JsonlWriter(path)
            except LockedError as error:
                os._exit(0 if f"another process (pid {os.getppid()}," in str(error) else 2)
            os._exit(3)
        assert status_of_child(child) == 0
        assert "LockedError" in open_elsewhere(path), "the parent's lock outlives the child"


def test_a_forked_child_may_write_files_of_its_own(path: Path, tmp_path: Path) -> None:
    with JsonlWriter(path):
        child = os.fork()
        if child == 0:
            with JsonlWriter(tmp_path / "child.jsonl") as writer:
                writer.append(b"{}")
            os._exit(0)
        assert status_of_child(child) == 0
        assert "LockedError" in open_elsewhere(path)
    assert [line.data for line in read_lines(tmp_path / "child.jsonl")] == [b"{}"]


def test_a_child_forked_while_another_thread_takes_locks_can_take_its_own(path: Path, tmp_path: Path) -> None:
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            FileLock(path).release()

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for number in range(20):
            child = os.fork()
            if child == 0:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(PATIENCE)
                FileLock(tmp_path / f"own_{number}").release()
                os._exit(0)
            assert status_of_child(child) == 0
    finally:
        stop.set()
        thread.join()
    JsonlWriter(path).close()


def test_a_killed_owner_blocks_nobody(path: Path) -> None:
    with owner_of(path) as owner:
        owner.kill()
        assert lock_path(path).exists(), "its sidecar is stale"
        with JsonlWriter(path) as writer:
            writer.append(b"{}")
            with pytest.raises(LockedError, match=f"pid {os.getpid()}"):
                JsonlWriter(path)
        assert not lock_path(path).exists()


def test_a_killed_owner_blocks_nobody_while_its_forked_child_lives_on(path: Path) -> None:
    with owner_of(path, "fork") as owner:
        owner.kill()
        os.kill(owner.forked, 0)  # raises if it is gone
        with JsonlWriter(path) as writer:
            writer.append(b"{}")
            os.kill(owner.forked, 0)
    assert [line.data for line in read_lines(path)] == [b"{}"]


@pytest.mark.parametrize(
    "content", [b"", b"garbage", b'{"pid":1,"host":"gone","since":"2020-01-01T00:00:00+00:00"}' + b" " * 500]
)
def test_a_stale_sidecar_is_taken_over(path: Path, content: bytes) -> None:
    lock_path(path).write_bytes(content)
    with JsonlWriter(path):
        told = open_elsewhere(path)
        assert f"pid {os.getpid()}, host {socket.gethostname()}" in told
        assert "gone" not in told
    assert not lock_path(path).exists()


def test_the_sidecar_is_hidden_and_goes_on_close(path: Path) -> None:
    with JsonlWriter(path):
        assert sorted(entry.name for entry in path.parent.iterdir()) == [".log.jsonl.lock", "log.jsonl"]
    assert [entry.name for entry in path.parent.iterdir()] == ["log.jsonl"]


def test_releasing_twice_harms_no_later_owner(path: Path) -> None:
    lock = FileLock(path)
    lock.release()
    with JsonlWriter(path):
        lock.release()
        assert "LockedError" in open_elsewhere(path)


def test_release_leaves_the_sidecar_of_a_later_owner_alone(path: Path) -> None:
    """Someone deleted the sidecar, or the whole directory, while its owner lived."""
    writer = JsonlWriter(path)
    lock_path(path).unlink()
    with owner_of(path) as owner:
        writer.close()
        with pytest.raises(LockedError, match=f"pid {owner.pid}"):
            JsonlWriter(path)


def test_a_lock_on_a_sidecar_that_was_just_removed_does_not_count(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner lets go between the opening of its sidecar by the next one and the lock on it."""
    owner = FileLock(path)
    real, moments = fcntl.flock, iter([owner.release])

    def flock(descriptor: int, operation: int) -> None:
        next(moments, lambda: None)()
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    second = FileLock(path)
    assert lock_path(path).exists()
    assert "LockedError" in open_elsewhere(path)
    second.release()
    assert not lock_path(path).exists()


def test_a_sidecar_without_a_name_still_locks(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with JsonlWriter(path), pytest.raises(LockedError, match="is being written by another process; wait"):
        JsonlWriter(path)


def test_a_file_system_without_locks_says_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.raises(WriteError, match=r"log\.jsonl: this file system has no locks.*local or NFSv4"):
        JsonlWriter(path)


RACER = """
import os, sys
from pathlib import Path
from rollbook.errors import LockedError
from rollbook.records.jsonl import JsonlWriter

path, name, wins = Path(sys.argv[1]), sys.argv[2], 0
inside = path.with_name("inside")
while wins < 12:
    try:
        writer = JsonlWriter(path)
    except LockedError:
        continue
    os.close(os.open(inside, os.O_CREAT | os.O_EXCL))  # fails if anyone else is between here and the unlink
    writer.append(b'{"by":"%s","win":%d}' % (name.encode(), wins))
    os.unlink(inside)
    writer.close()
    wins += 1
"""


def test_of_many_processes_exactly_one_wins_at_a_time(path: Path) -> None:
    racers = [subprocess.Popen([sys.executable, "-c", RACER, str(path), f"p{n}"]) for n in range(6)]
    try:
        assert [racer.wait(PATIENCE) for racer in racers] == [0] * 6
    finally:
        for racer in racers:
            racer.kill()
            racer.wait()
    lines = [line.data for line in read_lines(path)]
    assert sorted(lines) == sorted(b'{"by":"p%d","win":%d}' % (n, win) for n in range(6) for win in range(12))
    assert [entry.name for entry in path.parent.iterdir()] == ["log.jsonl"]
