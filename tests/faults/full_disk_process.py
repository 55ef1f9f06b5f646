"""What happens on a full disk, run inside a small one. Exits 0 when every promise was kept.

    python full_disk_process.py DIRECTORY tmpfs|limit

`tmpfs`: DIRECTORY is mounted as a tmpfs of 256 KiB first; the caller provides the namespace. `limit`: the
size of every file is limited instead, which the kernel refuses in the same way, in the middle of a write.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

from harness import identity_of, make_line

from rollbook.errors import LockedError, WriteError
from rollbook.records.atomic import write_atomic
from rollbook.records.jsonl import EVERY_LINE, ON_CLOSE, JsonlWriter, every_ms, read_lines

SIZE = 256 * 1024
LINE = 1_500  # no divisor of the page size: the line that meets the end of the disk half fits


class SmallDisk:
    """256 KiB, most of them taken by a ballast that can be thrown out."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "none", str(directory)], check=True)
        self.fill()

    def fill(self) -> None:
        (self.directory / "ballast").write_bytes(b"\0" * (SIZE * 3 // 4))

    def free(self) -> None:
        (self.directory / "ballast").unlink()


class SizeLimit:
    """64 KiB a file until `free` doubles it; `fill` halves it again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.limit = SIZE // 2
        self.fill()

    def fill(self) -> None:
        self.limit //= 2
        self._set()

    def free(self) -> None:
        self.limit *= 2
        self._set()

    def _set(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, resource.RLIM_INFINITY))


Disk = SmallDisk | SizeLimit


class CountedWrites:
    """Proof that lines did half fit: `os.write` with a count of the writes that were cut short."""

    def __init__(self) -> None:
        self.short = 0
        self.real = os.write

    def write(self, descriptor: int, data: bytes) -> int:
        written = self.real(descriptor, data)
        self.short += written < len(data)
        return written


def present(path: Path) -> list[str]:
    content = path.read_bytes()
    assert content == b"" or content.endswith(b"\n"), "a half line was left behind"
    return [identity_of(line.data) for line in read_lines(path)]


def append_until_full(writer: JsonlWriter, prefix: str) -> tuple[list[str], WriteError]:
    acknowledged: list[str] = []
    for number in range(1_000):
        try:
            writer.wait(writer.append(make_line(f"{prefix}-{number}", LINE)))
        except WriteError as error:
            return acknowledged, error
        acknowledged.append(f"{prefix}-{number}")
    raise AssertionError("the disk never filled")


def the_same_writer_goes_on(disk: Disk) -> None:
    path = disk.directory / "same.jsonl"
    with JsonlWriter(path, sync=EVERY_LINE) as writer:
        acknowledged, error = append_until_full(writer, "a")
        assert len(acknowledged) > 10
        assert str(path) in str(error), error
        assert "append failed" in str(error), error
        assert "Free some space" in str(error), error
        assert present(path) == acknowledged
        for _ in range(3):  # and again, and again: nothing is lost by trying
            more, _ = append_until_full(writer, "b")
            assert more == []
        assert present(path) == acknowledged
        disk.free()
        writer.append(make_line("freed", LINE))
        assert present(path) == [*acknowledged, "freed"]
    disk.fill()
    path.unlink()


def a_reopened_writer_goes_on(disk: Disk) -> None:
    path = disk.directory / "reopened.jsonl"
    with JsonlWriter(path, sync=ON_CLOSE) as writer:
        acknowledged, _ = append_until_full(writer, "a")
    with JsonlWriter(path, sync=EVERY_LINE) as writer:  # while the disk is still full
        assert present(path) == acknowledged
        try:
            JsonlWriter(path)
        except LockedError as error:
            assert str(path) in str(error)
        else:
            raise AssertionError("a full disk let a second writer in")
        acknowledged += append_until_full(writer, "b")[0]
    disk.free()
    with JsonlWriter(path, sync=EVERY_LINE) as writer:
        writer.append(make_line("freed", LINE))
    assert present(path) == [*acknowledged, "freed"]
    disk.fill()
    path.unlink()


def several_writers_meet_the_end_together(disk: Disk) -> None:
    writers = [
        JsonlWriter(disk.directory / f"{name}.jsonl", sync=policy)
        for name, policy in (("one", EVERY_LINE), ("two", every_ms(1)), ("three", ON_CLOSE))
    ]
    acknowledged: dict[str, list[str]] = {}

    def work(name: str, writer: JsonlWriter) -> None:
        acknowledged[name] = append_until_full(writer, name)[0]

    threads = [
        threading.Thread(target=work, args=(f"{writer.path.stem}-{thread}", writer))
        for writer in writers
        for thread in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(acknowledged) == len(threads)
    disk.free()
    for writer in writers:
        writer.append(make_line(f"{writer.path.stem}-freed", LINE))
        writer.close()
        found = present(writer.path)
        expected = [
            line
            for name, lines in acknowledged.items()
            if name.startswith(writer.path.stem)
            for line in lines
        ]
        assert sorted(found) == sorted([*expected, f"{writer.path.stem}-freed"])
        writer.path.unlink()
    disk.fill()


def a_whole_file_is_old_or_new(disk: Disk) -> None:
    path = disk.directory / "run.json"
    write_atomic(path, b"old")
    before = sorted(entry.name for entry in disk.directory.iterdir())
    try:
        write_atomic(path, b"n" * SIZE)
    except WriteError as error:
        assert str(path) in str(error), error
        assert "previous content is untouched" in str(error), error
    else:
        raise AssertionError("the disk is larger than it should be")
    assert path.read_bytes() == b"old"
    assert sorted(entry.name for entry in disk.directory.iterdir()) == before, "something was left behind"
    path.unlink()


def main() -> None:
    directory, kind = Path(sys.argv[1]), sys.argv[2]
    disk: Disk = SmallDisk(directory) if kind == "tmpfs" else SizeLimit(directory)
    writes = CountedWrites()
    with mock.patch.object(os, "write", writes.write):
        the_same_writer_goes_on(disk)
        a_reopened_writer_goes_on(disk)
        several_writers_meet_the_end_together(disk)
        a_whole_file_is_old_or_new(disk)
    assert writes.short, "no write was cut short"
    print("kept")


if __name__ == "__main__":
    main()
