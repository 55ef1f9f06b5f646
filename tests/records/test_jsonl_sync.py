"""What is acknowledged is on the disk: when fsyncs happen, what a failing one does, who may share one."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from rollbook.errors import WriteError
from rollbook.records.jsonl import EVERY_LINE, ON_CLOSE, JsonlWriter, SyncPolicy, every_ms, read_lines

HOUR_MS = 3_600_000
PATIENCE = 30.0


class Disk:
    """Stands in for fdatasync: notes how much of the file each call covers, can hold or fail calls."""

    def __init__(self) -> None:
        self.synced: list[int] = []  # the size of the file at the start of each finished fdatasync
        self.fail_with: int | None = None
        self.held = False
        self.entered = threading.Semaphore(0)
        self.let_one_go = threading.Semaphore(0)

    def fdatasync(self, descriptor: int) -> None:
        covered = os.fstat(descriptor).st_size
        if self.held:
            self.entered.release()
            assert self.let_one_go.acquire(timeout=PATIENCE)
        if self.fail_with is not None:
            raise OSError(self.fail_with, os.strerror(self.fail_with))
        self.synced.append(covered)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr(os, "fdatasync", disk.fdatasync)
    return disk


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(max_workers=8) as pool:
        yield pool


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.jsonl"


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "this never became true"
        time.sleep(0.001)


def test_every_line_is_synced_before_append_returns(path: Path, disk: Disk) -> None:
    with JsonlWriter(path, sync=EVERY_LINE) as writer:
        for count in range(1, 6):
            end = writer.append(b"{}")
            assert writer.durable == end
            assert disk.synced == [3 * n for n in range(1, count + 1)]
    assert len(disk.synced) == 5, "nothing is left to sync on close"


def test_on_close_syncs_once(path: Path, disk: Disk) -> None:
    with JsonlWriter(path, sync=ON_CLOSE) as writer:
        for _ in range(100):
            writer.append(b"{}")
        assert (disk.synced, writer.durable) == ([], 0)
    assert disk.synced == [300]


@pytest.mark.parametrize("policy", [ON_CLOSE, every_ms(HOUR_MS), EVERY_LINE])
def test_wait_and_sync_work_under_every_policy(path: Path, disk: Disk, policy: SyncPolicy) -> None:
    with JsonlWriter(path, sync=policy) as writer:
        first = writer.append(b"{}")
        writer.append(b"{}")
        writer.wait(first)
        assert writer.durable >= first
        assert disk.synced[-1] >= writer.durable
        assert writer.sync() == writer.durable == writer.position == 6
        calls = len(disk.synced)
        writer.wait(first)
        writer.sync()
        assert len(disk.synced) == calls, "what is on the disk is not synced again"


def test_every_n_ms_syncs_by_itself(path: Path, disk: Disk) -> None:
    with JsonlWriter(path, sync=every_ms(1)) as writer:
        for _ in range(3):
            end = writer.append(b"{}")
            eventually(lambda: writer.durable == writer.position)
            assert disk.synced[-1] >= end


def test_lines_within_one_interval_share_a_sync(path: Path, disk: Disk) -> None:
    with JsonlWriter(path, sync=every_ms(HOUR_MS)) as writer:
        for _ in range(100):
            writer.append(b"{}")
        assert disk.synced == []
    assert disk.synced == [300], "close does not wait for the interval to pass"


def test_the_lines_already_there_are_not_taken_for_durable(path: Path, disk: Disk) -> None:
    path.write_bytes(b"{}\n")  # by a process that was killed before its fsync
    with JsonlWriter(path) as writer:
        assert (writer.position, writer.durable) == (3, 0)
        writer.wait(writer.position)
        assert disk.synced == [3]


def test_a_cut_tail_is_synced_on_reopen(path: Path, disk: Disk) -> None:
    path.write_bytes(b'{}\n{"half')
    with JsonlWriter(path):
        assert disk.synced == [3]


def test_names_are_synced_before_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(str(Path(f"/proc/self/fd/{fd}").readlink())))
    with JsonlWriter(tmp_path / "a" / "b" / "log.jsonl", sync=EVERY_LINE):
        assert synced == [str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")]
    synced.clear()
    with JsonlWriter(tmp_path / "a" / "b" / "log.jsonl"):
        assert synced == [str(tmp_path / "a" / "b")], "its maker may have died before doing so"


def test_wait_returns_only_after_the_fsync_that_covers_its_line(
    path: Path, disk: Disk, threads: ThreadPoolExecutor
) -> None:
    with JsonlWriter(path) as writer:
        disk.held = True
        first_end = writer.append(b"{}")
        first = threads.submit(writer.wait, first_end)
        assert disk.entered.acquire(timeout=PATIENCE)
        second_end = writer.append(b"{}")  # written while the fsync for the first line is under way
        second = threads.submit(writer.wait, second_end)
        disk.let_one_go.release()
        first.result(timeout=PATIENCE)
        assert disk.entered.acquire(timeout=PATIENCE), "the second line needs an fsync of its own"
        assert not second.done()
        assert writer.durable == first_end
        disk.held = False
        disk.let_one_go.release()
        second.result(timeout=PATIENCE)
        assert writer.durable == second_end
    assert disk.synced == [first_end, second_end]


def test_concurrent_waiters_share_an_fsync(path: Path, disk: Disk, threads: ThreadPoolExecutor) -> None:
    with JsonlWriter(path, sync=EVERY_LINE) as writer:
        disk.held = True
        waiting: list[Future[int]] = [threads.submit(writer.append, b"{}")]
        assert disk.entered.acquire(timeout=PATIENCE)
        waiting += [threads.submit(writer.append, b"{}") for _ in range(6)]
        eventually(lambda: writer.position == 21)
        assert not any(future.done() for future in waiting)
        disk.held = False
        disk.let_one_go.release()
        assert sorted(future.result(timeout=PATIENCE) for future in waiting) == [3 * n for n in range(1, 8)]
    assert disk.synced == [3, 21], "six lines, one fsync"


def test_waiting_for_a_line_that_was_never_appended_is_an_error(path: Path) -> None:
    with JsonlWriter(path) as writer:
        end = writer.append(b"{}")
        with pytest.raises(ValueError, match=r"log\.jsonl: byte 4 is past the last line"):
            writer.wait(end + 1)


def refuses_everything(writer: JsonlWriter) -> None:
    for action in (lambda: writer.append(b"{}"), writer.sync, lambda: writer.wait(writer.position)):
        with pytest.raises(WriteError, match=r"log\.jsonl.*did not confirm.*up to byte 3 is safe"):
            action()


def test_a_failed_fsync_poisons_the_writer(path: Path, disk: Disk) -> None:
    writer = JsonlWriter(path, sync=EVERY_LINE)
    writer.append(b"{}")
    disk.fail_with = errno.EIO
    with pytest.raises(WriteError, match=r"log\.jsonl: the disk did not confirm.*Input/output error"):
        writer.append(b'{"lost":1}')
    disk.fail_with = None  # the kernel reports an error once and may have dropped the pages
    refuses_everything(writer)
    assert writer.durable == 3
    assert disk.synced == [3], "the writer does not even ask again"
    with pytest.raises(WriteError, match="did not confirm"):
        writer.close()
    with JsonlWriter(path, sync=EVERY_LINE) as reopened:
        assert reopened.append(b"{}") == reopened.durable


def test_a_failed_fsync_reaches_every_waiter(path: Path, disk: Disk, threads: ThreadPoolExecutor) -> None:
    writer = JsonlWriter(path, sync=EVERY_LINE)
    disk.held, disk.fail_with = True, errno.EIO
    waiting = [threads.submit(writer.append, b"{}")]
    assert disk.entered.acquire(timeout=PATIENCE)
    waiting += [threads.submit(writer.append, b"{}") for _ in range(4)]
    eventually(lambda: writer.position == 15)
    disk.held = False
    disk.let_one_go.release()
    assert all(isinstance(future.exception(timeout=PATIENCE), WriteError) for future in waiting)
    assert (writer.durable, disk.synced) == (0, [])
    with pytest.raises(WriteError):
        writer.close()


def test_a_sync_that_fails_in_the_background_is_not_forgotten(path: Path, disk: Disk) -> None:
    writer = JsonlWriter(path, sync=every_ms(1))
    writer.append(b"{}")
    eventually(lambda: writer.durable == 3)
    disk.fail_with = errno.ENOSPC
    writer.append(b"{}")
    eventually(lambda: _is_poisoned(writer))
    disk.fail_with = None
    refuses_everything(writer)
    with pytest.raises(WriteError, match="No space left"):
        writer.close()
    JsonlWriter(path).close()


def test_close_tells_of_a_background_failure_that_nobody_met(path: Path, disk: Disk) -> None:
    writer = JsonlWriter(path, sync=every_ms(HOUR_MS))
    writer.append(b"{}")
    disk.fail_with = errno.EIO
    with pytest.raises(WriteError, match="did not confirm"):
        writer.close()
    writer.close()
    disk.fail_with = None
    JsonlWriter(path).close()


def _is_poisoned(writer: JsonlWriter) -> bool:
    try:
        writer.append(b"{}")
    except WriteError:
        return True
    return False


def test_many_threads_lose_nothing(path: Path) -> None:
    def work(thread: int) -> None:
        for number in range(50):
            writer.wait(writer.append(b'{"thread":%d,"number":%d}' % (thread, number)))

    with JsonlWriter(path, sync=every_ms(1)) as writer, ThreadPoolExecutor(max_workers=8) as pool:
        list(pool.map(work, range(8)))
    lines = [line.data for line in read_lines(path)]
    for thread in range(8):
        mine = [line for line in lines if b'"thread":%d,' % thread in line]
        assert mine == [b'{"thread":%d,"number":%d}' % (thread, number) for number in range(50)]
