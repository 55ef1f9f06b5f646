"""A follower sees every complete line once, and knows when what it has seen is no longer in the file."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollbook.records.jsonl import Line, read_lines
from rollbook.records.tail import Batch, Tail


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.jsonl"


def add(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def cut(path: Path, length: int) -> None:
    with path.open("r+b") as file:
        file.truncate(length)


def seen(batch: Batch) -> tuple[list[bytes], bool, bool]:
    return [line.data for line in batch.lines], batch.restarted, batch.more


def test_growth(path: Path) -> None:
    tail = Tail(path)
    add(path, b"one\ntwo\n")
    assert tail.poll() == Batch([Line(b"one", 1, 0, 4), Line(b"two", 2, 4, 8)], restarted=False, more=False)
    assert seen(tail.poll()) == ([], False, False)
    add(path, b"three\n")
    assert tail.poll() == Batch([Line(b"three", 3, 8, 14)], restarted=False, more=False)
    assert tail.offset == 14


def test_a_partial_line_waits_for_its_end(path: Path) -> None:
    tail = Tail(path)
    add(path, b"one\ntw")
    assert seen(tail.poll()) == ([b"one"], False, False)
    assert seen(tail.poll()) == ([], False, False)
    add(path, b"o")
    assert seen(tail.poll()) == ([], False, False)
    add(path, b"\nthr")
    assert tail.poll().lines == [Line(b"two", 2, 4, 8)]


def test_a_partial_line_that_is_cut_and_written_anew_restarts_nothing(path: Path) -> None:
    tail = Tail(path)
    add(path, b"one\nhalf")
    tail.poll()
    cut(path, 4)
    add(path, b"two\n")
    assert seen(tail.poll()) == ([b"two"], False, False)


def test_a_character_split_over_polls(path: Path) -> None:
    tail = Tail(path)
    for byte in "é\u2028漢🙂".encode():
        add(path, bytes([byte]))
        assert tail.poll().lines == []
    add(path, b"\n")
    assert [line.data.decode() for line in tail.poll().lines] == ["é\u2028漢🙂"]


def test_truncation(path: Path) -> None:
    tail = Tail(path)
    add(path, b"one\ntwo\nthree\n")
    tail.poll()
    cut(path, 4)
    assert seen(tail.poll()) == ([b"one"], True, False)
    assert seen(tail.poll()) == ([], False, False)
    add(path, b"four\n")
    assert tail.poll() == Batch([Line(b"four", 2, 4, 9)], restarted=False, more=False)


def test_truncation_to_nothing(path: Path) -> None:
    tail = Tail(path)
    add(path, b"one\n")
    tail.poll()
    cut(path, 0)
    assert seen(tail.poll()) == ([], True, False)
    assert seen(tail.poll()) == ([], False, False)


@pytest.mark.parametrize("regrown", [b"2wo\n", b"2wo\nfour\n", b"a much longer line than before\n"])
def test_truncation_and_regrowth_past_the_offset(path: Path, regrown: bytes) -> None:
    tail = Tail(path)
    add(path, b"one\ntwo\n")
    tail.poll()
    cut(path, 4)
    add(path, regrown)
    assert seen(tail.poll()) == ([b"one", *regrown.split(b"\n")[:-1]], True, False)


def test_a_rewrite_during_a_poll_is_noticed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tail = Tail(path)
    add(path, b"one\ntwo\n")
    tail.poll()
    real, hits = os.pread, iter([True])

    def pread(descriptor: int, length: int, offset: int) -> bytes:
        if next(hits, False):
            cut(path, 4)
            add(path, b"longer than before\nfour\n")
        return real(descriptor, length, offset)

    monkeypatch.setattr(os, "pread", pread)
    assert seen(tail.poll()) == ([b"one", b"longer than before", b"four"], True, False)


def test_replacement_by_rename(path: Path) -> None:
    tail = Tail(path)
    add(path, b"one\ntwo\n")
    tail.poll()
    add(path.with_name("new"), b"one\ntwo\nthree\n")
    path.with_name("new").replace(path)
    assert seen(tail.poll()) == ([b"one", b"two", b"three"], True, False)


def test_deletion_and_creation(path: Path) -> None:
    tail = Tail(path)
    assert seen(tail.poll()) == ([], False, False), "a file that is still to come"
    add(path, b"one\n")
    assert seen(tail.poll()) == ([b"one"], False, False)
    path.unlink()
    assert seen(tail.poll()) == ([], True, False)
    assert seen(tail.poll()) == ([], False, False)
    add(path, b"two\nthree\n")
    assert tail.poll().lines == [Line(b"two", 1, 0, 4), Line(b"three", 2, 4, 10)]


def test_deletion_and_creation_between_two_polls(path: Path) -> None:
    tail = Tail(path)
    add(path, b"one\n")
    tail.poll()
    path.unlink()
    add(path, b"two\nthree\n")  # may well get the same inode number
    assert seen(tail.poll()) == ([b"two", b"three"], True, False)


def test_polls_are_bounded_and_say_when_there_is_more(path: Path) -> None:
    tail = Tail(path, max_bytes=10)
    add(path, b"one\ntwo\nthree\nfour\n")
    assert seen(tail.poll()) == ([b"one", b"two"], False, True)
    assert seen(tail.poll()) == ([b"three"], False, True)
    assert seen(tail.poll()) == ([b"four"], False, False)
    assert seen(tail.poll()) == ([], False, False)


def test_a_partial_tail_is_not_more(path: Path) -> None:
    tail = Tail(path)
    add(path, b"one\nhalf")
    assert seen(tail.poll()) == ([b"one"], False, False)


def test_a_line_longer_than_the_bound(path: Path) -> None:
    tail = Tail(path, max_bytes=10)
    long = b"x" * 1000
    add(path, b"one\n" + long + b"\ntwo\n")
    lines: list[bytes] = []
    for _ in range(3):
        lines += seen(tail.poll())[0]
    assert lines == [b"one", long, b"two"]
    add(path, long)
    assert seen(tail.poll()) == ([], False, False)
    add(path, long + b"\n")
    assert seen(tail.poll()) == ([long + long], False, False)


def test_going_on_from_an_earlier_tail(path: Path) -> None:
    add(path, b"one\ntwo\n")
    first = Tail(path)
    first.poll()
    add(path, b"three\n")
    second = Tail(path, start=first.offset, number=first.number)
    assert second.poll().lines == [Line(b"three", 3, 8, 14)]
    late = Tail(path, start=99)
    assert late.poll().restarted, "the file is shorter than when the offset was noted"


class TailMachine(RuleBasedStateMachine):
    """Whatever happens to the file, a consumer that obeys `restarted` ends up with its complete lines."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.path = Path(self.directory.name, "log.jsonl")
        self.written = 0
        self.content: bytes | None = None  # None: there is no file
        self.consumed: list[Line] = []

    @initialize(max_bytes=st.sampled_from([1, 5, 64, 1 << 20]))
    def begin(self, max_bytes: int) -> None:
        self.tail = Tail(self.path, max_bytes=max_bytes)

    def teardown(self) -> None:
        self.directory.cleanup()

    def unique(self, shape: str) -> bytes:
        """Text no earlier write had, so that a rewritten place differs from what stood there."""
        self.written += 1
        return shape.replace("#", f"<{self.written}>").encode()

    shapes = st.text(alphabet="#\n\u2028é", max_size=8)

    @rule(shape=shapes)
    def append(self, shape: str) -> None:
        data = self.unique(shape)
        add(self.path, data)
        self.content = (self.content or b"") + data

    @precondition(lambda self: self.content is not None)
    @rule(fraction=st.floats(0, 1), shape=shapes)
    def cut_and_regrow(self, fraction: float, shape: str) -> None:
        assert self.content is not None
        length = int(len(self.content) * fraction)
        data = self.unique(shape)
        cut(self.path, length)
        add(self.path, data)
        self.content = self.content[:length] + data

    @rule(shape=shapes)
    def replace(self, shape: str) -> None:
        self.content = self.unique(shape)
        aside = self.path.with_suffix(".new")
        aside.write_bytes(self.content)
        aside.replace(self.path)

    @precondition(lambda self: self.content is not None)
    @rule()
    def delete(self) -> None:
        self.path.unlink()
        self.content = None

    @rule()
    def poll(self) -> None:
        self.poll_once()

    def poll_once(self) -> bool:
        batch = self.tail.poll()
        if batch.restarted:
            self.consumed.clear()
        self.consumed += batch.lines
        return batch.more

    @rule()
    def catch_up(self) -> None:
        while self.poll_once():
            pass
        present = list(read_lines(self.path)) if self.content is not None else []
        assert self.consumed == present
        assert [line.data for line in present] == (self.content or b"").split(b"\n")[:-1]
        assert self.tail.offset == (present[-1].end if present else 0)

    @invariant()
    def numbers_are_in_order(self) -> None:
        assert [line.number for line in self.consumed] == list(range(1, len(self.consumed) + 1))


TestTailAgainstTheFile = TailMachine.TestCase
TestTailAgainstTheFile.settings = settings(deadline=None, max_examples=80, stateful_step_count=30)
