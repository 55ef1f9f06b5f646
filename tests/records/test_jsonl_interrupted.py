"""Writes that stop half way, signals that arrive in the middle of one, processes that fork around one."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollbook.errors import WriteError
from rollbook.records.jsonl import EVERY_LINE, JsonlWriter, read_lines

PATIENCE = 30


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.jsonl"


class Writes:
    """Stands in for os.write: `then` decides what happens to the next line that holds `"hit"`."""

    def __init__(self) -> None:
        self.real = os.write
        self.then: Callable[[int, bytes], int] | None = None

    def write(self, descriptor: int, data: bytes) -> int:
        then, self.then = (self.then, None) if b'"hit"' in data else (None, self.then)
        return (then or self.real)(descriptor, data)

    def short(self, count: int) -> None:
        self.then = lambda descriptor, data: self.real(descriptor, data[:count])

    def error(self, number: int, after: int = 0) -> None:
        def fail(descriptor: int, data: bytes) -> int:
            self.real(descriptor, data[:after])
            raise OSError(number, os.strerror(number))

        self.then = fail

    def signal(self, number: signal.Signals, *, before: bool = False, count: int | None = None) -> None:
        """A signal that arrives while the system call is under way is handled right after it."""

        def interrupted(descriptor: int, data: bytes) -> int:
            if before:
                os.kill(os.getpid(), number)
            written = self.real(descriptor, data[:count])
            if not before:
                os.kill(os.getpid(), number)
            return written

        self.then = interrupted


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Writes:
    writes = Writes()
    monkeypatch.setattr(os, "write", writes.write)
    return writes


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C raises even where the tests run in the background, with SIGINT ignored."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


def lines_of(path: Path) -> list[bytes]:
    return [line.data for line in read_lines(path)]


@pytest.mark.parametrize("count", [0, 1, 7, 8])
def test_a_short_write_is_taken_back(path: Path, writes: Writes, count: int) -> None:
    with JsonlWriter(path, sync=EVERY_LINE) as writer:
        before = writer.append(b"{}")
        writes.short(count)
        with pytest.raises(WriteError, match=r"log\.jsonl: append failed: the disk is full.*not written"):
            writer.append(b'{"hit":1}')
        assert path.read_bytes() == b"{}\n"
        assert (writer.position, writer.durable) == (before, before)
        writer.append(b'{"hit":2}')
    assert lines_of(path) == [b"{}", b'{"hit":2}']


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
@pytest.mark.parametrize("after", [0, 5])
def test_a_failed_write_is_taken_back(path: Path, writes: Writes, number: int, after: int) -> None:
    with JsonlWriter(path, sync=EVERY_LINE) as writer:
        writer.append(b"{}")
        writes.error(number, after)
        with pytest.raises(WriteError, match=rf"log\.jsonl: append failed: {os.strerror(number)}"):
            writer.append(b'{"hit":1}')
        assert path.read_bytes() == b"{}\n"
        writer.append(b'{"hit":2}')
    assert lines_of(path) == [b"{}", b'{"hit":2}']


def test_a_half_line_that_cannot_be_cut_stops_the_writer_and_goes_on_reopen(
    path: Path, writes: Writes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, length: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    writer = JsonlWriter(path)
    writer.wait(writer.append(b"{}"))
    writes.short(5)
    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", refuse)
        with pytest.raises(WriteError, match="half line could not be cut"):
            writer.append(b'{"hit":1}')
    with pytest.raises(WriteError, match="half line could not be cut"):
        writer.append(b"{}")
    assert path.read_bytes() == b'{}\n{"hit', "nothing was glued to the half line"
    writer.close()
    with JsonlWriter(path) as reopened:
        reopened.append(b"{}")
    assert lines_of(path) == [b"{}", b"{}"]


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("count", [None, 4])
def test_ctrl_c_during_a_write_costs_no_acknowledged_line(
    path: Path, writes: Writes, count: int | None
) -> None:
    """A line written but not counted would shift every later offset, and the next cut would tear a line."""
    with JsonlWriter(path) as writer:
        writes.signal(signal.SIGINT, count=count)
        with pytest.raises(KeyboardInterrupt):
            writer.append(b'{"hit":1}')
        writer.wait(writer.append(b'{"acknowledged":1}'))
        assert writer.position == writer.durable == path.stat().st_size
        writes.short(3)
        with pytest.raises(WriteError):
            writer.append(b'{"hit":2}')
        writer.append(b'{"last":1}')
    interrupted = [b'{"hit":1}'] if count is None else []
    assert lines_of(path) == [*interrupted, b'{"acknowledged":1}', b'{"last":1}']


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_and_then_a_file_that_cannot_be_repaired(
    path: Path, writes: Writes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, length: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    writer = JsonlWriter(path)
    writes.signal(signal.SIGINT, count=4)
    with pytest.raises(KeyboardInterrupt):
        writer.append(b'{"hit":1}')
    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", refuse)
        with pytest.raises(WriteError, match=r"log\.jsonl: an interrupted append could not be undone"):
            writer.append(b"{}")
    with pytest.raises(WriteError, match="could not be undone"):
        writer.append(b"{}")
    writer.close()
    assert path.read_bytes() == b'{"hi'


@pytest.fixture
def on_signal() -> Iterator[Callable[[Callable[[], object]], None]]:
    previous = signal.getsignal(signal.SIGUSR1)

    def install(action: Callable[[], object]) -> None:
        signal.signal(signal.SIGUSR1, lambda *_: action())

    yield install
    signal.signal(signal.SIGUSR1, previous)


@pytest.mark.parametrize("before", [False, True])
def test_a_signal_handler_may_append_in_the_middle_of_an_append(
    path: Path, writes: Writes, on_signal: Callable[[Callable[[], object]], None], before: bool
) -> None:
    writer = JsonlWriter(path, sync=EVERY_LINE)
    on_signal(lambda: writer.append(b'{"preempted":1}'))
    writer.append(b"{}")
    writes.signal(signal.SIGUSR1, before=before)
    end = writer.append(b'{"hit":1}')
    assert end <= writer.durable == writer.position == path.stat().st_size
    writer.append(b'{"after":1}')
    writer.close()
    assert sorted(lines_of(path)) == sorted([b"{}", b'{"hit":1}', b'{"preempted":1}', b'{"after":1}'])


def test_a_signal_handler_may_append_in_the_middle_of_a_sync(
    path: Path, monkeypatch: pytest.MonkeyPatch, on_signal: Callable[[Callable[[], object]], None]
) -> None:
    real = os.fdatasync
    hits = iter([True])

    def fdatasync(descriptor: int) -> None:
        if next(hits, False):
            os.kill(os.getpid(), signal.SIGUSR1)
        real(descriptor)

    writer = JsonlWriter(path, sync=EVERY_LINE)
    on_signal(lambda: writer.append(b'{"preempted":1}'))
    monkeypatch.setattr(os, "fdatasync", fdatasync)
    writer.append(b"{}")
    assert writer.durable == writer.position, "an fsync that began earlier does not take the newer one back"
    writer.close()
    assert lines_of(path) == [b"{}", b'{"preempted":1}']


def in_forked_child(action: Callable[[], object]) -> str:
    """What the action raises in a forked child; a child that hangs is ended by its alarm."""
    reader, sender = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(PATIENCE)
        try:
            action()
            answer = "fine"
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(sender, answer.encode())
        os._exit(0)
    os.close(sender)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read().decode()
    os.waitpid(child, 0)
    return answer or "hung"


def test_a_forked_child_is_refused_and_the_parent_goes_on(path: Path) -> None:
    with JsonlWriter(path) as writer:
        end = writer.append(b"{}")
        for action in (lambda: writer.append(b"{}"), lambda: writer.wait(end), writer.sync):
            answer = in_forked_child(action)
            assert answer.startswith("WriteError"), answer
            assert f"opened by pid {os.getpid()}; a forked process must not append" in answer
        assert in_forked_child(writer.close) == "fine"
        writer.append(b"{}")
    assert lines_of(path) == [b"{}", b"{}"]


def test_a_child_forked_during_an_append_is_refused_and_does_not_hang(path: Path, writes: Writes) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def hold(descriptor: int, data: bytes) -> int:
        inside.set()
        go_on.wait(PATIENCE)
        return writes.real(descriptor, data)

    with JsonlWriter(path) as writer:
        writes.then = hold
        thread = threading.Thread(target=writer.append, args=(b'{"hit":1}',))
        thread.start()
        assert inside.wait(PATIENCE)
        answers = [in_forked_child(lambda: writer.append(b"{}")), in_forked_child(writer.close)]
        go_on.set()
        thread.join()
    assert answers[0].startswith("WriteError")
    assert answers[1] == "fine"
    assert lines_of(path) == [b'{"hit":1}']


def test_a_with_block_left_by_a_forked_child_closes_nothing_of_the_parents(path: Path) -> None:
    def leave() -> None:
        with writer:
            pass

    with JsonlWriter(path) as writer:
        assert in_forked_child(leave) == "fine"
        writer.append(b"{}")
        assert (path.parent / ".log.jsonl.lock").exists()
    assert lines_of(path) == [b"{}"]
