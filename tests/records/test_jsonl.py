"""Lines come out as they went in; a reopened file is repaired or refused, never guessed at."""

from __future__ import annotations

import fcntl
import json
import os
import resource
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.errors import BadLineError, RollbookError, WriteError
from rollbook.records import jsonl
from rollbook.records.jsonl import JsonlWriter, Line, every_ms, read_blocks, read_lines
from rollbook.records.plain import encode

PIECES = [b"\n", b"a", b"bc", b"\r", b"0123456", b"\xe2\x80\xa8"]
CONTENT = st.lists(st.sampled_from(PIECES)).map(b"".join)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.jsonl"


@pytest.fixture
def tiny_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "_CHUNK", 7)


def lines_of(path: Path) -> list[bytes]:
    return [line.data for line in read_lines(path)]


def test_appended_lines_come_back_with_their_places(path: Path) -> None:
    with JsonlWriter(path) as writer:
        assert writer.position == 0
        assert writer.append(b'{"a":1}') == 8
        assert writer.append(b"{}") == 11
        assert writer.position == 11
    assert list(read_lines(path)) == [Line(b'{"a":1}', 1, 0, 8), Line(b"{}", 2, 8, 11)]


def test_a_line_is_one_write_on_an_append_only_descriptor(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[tuple[int, bytes]] = []
    real_write = os.write

    def write(descriptor: int, data: bytes) -> int:
        writes.append((fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND, data))
        return real_write(descriptor, data)

    big = encode({"text": "x" * 3_000_000})
    with JsonlWriter(path) as writer:
        monkeypatch.setattr(os, "write", write)
        writer.append(b'{"a":1}')
        writer.append(big)
    assert writes == [(os.O_APPEND, b'{"a":1}\n'), (os.O_APPEND, big + b"\n")]


def test_lines_of_one_write_are_all_there_or_none(path: Path) -> None:
    """Also of a file whose disk is told to begin before a sync: a megabyte of it is written at once."""
    some, big = [b'{"a":1}', b"{}"], encode({"text": "x" * 2_000_000})
    with JsonlWriter(path, is_large=True) as writer:
        assert writer.append_all(some) == 11
        assert writer.append_all([]) == 11
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
        try:
            with pytest.raises(WriteError, match="all earlier lines are intact"):
                writer.append_all([b'{"b":2}', big])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert path.read_bytes() == b'{"a":1}\n{}\n'
        with pytest.raises(ValueError, match="one JSON object without a newline"):
            writer.append_all([b"{}", b"[1]"])
        writer.append_all([big, b'{"c":3}'])
    assert [line.data for line in read_lines(path)] == [*some, big, b'{"c":3}']


@pytest.mark.parametrize(
    "data", [b'{"a":1}\n', b'{"a":\n1}', b"\n", b"", b" ", b"[1]", b"null", b'{"a":1', b"text"]
)
def test_what_could_not_be_read_back_is_refused(path: Path, data: bytes) -> None:
    with JsonlWriter(path) as writer:
        writer.append(b"{}")
        with pytest.raises(ValueError, match=r"log\.jsonl.*one JSON object without a newline"):
            writer.append(data)
        writer.append(b"{}")
    assert path.read_bytes() == b"{}\n{}\n"


@pytest.mark.parametrize("char", ["\u2028", "\u2029", "\u0085", "\r", "\x0b", "\x0c", "\x1c", "\x1e", "\r\n"])
def test_only_newline_ends_a_line(path: Path, char: str) -> None:
    text = f"before{char}after"
    raw = b'{"raw":"x' + char.replace("\n", "").encode() + b'y"}'
    path.write_bytes(raw + b"\n")
    assert lines_of(path) == [raw]
    with JsonlWriter(path, check=False) as writer:
        writer.append(encode({"text": text}))
    assert [json.loads(line, strict=False).get("text") for line in lines_of(path)] == [None, text]


def test_a_carriage_return_before_the_newline_belongs_to_the_line(path: Path) -> None:
    path.write_bytes(b'{"a":1}\r\n')
    with JsonlWriter(path) as writer:
        writer.append(b"{}")
    assert lines_of(path) == [b'{"a":1}\r', b"{}"]


def test_missing_parent_directories_are_made(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "log.jsonl"
    with JsonlWriter(path) as writer:
        writer.append(b"{}")
    assert path.read_bytes() == b"{}\n"


def test_an_empty_file_holds_no_line(path: Path) -> None:
    path.touch()
    with JsonlWriter(path) as writer:
        assert writer.position == 0
    assert lines_of(path) == []


def test_a_name_that_cannot_be_opened_says_so(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").mkdir()
    with pytest.raises(WriteError, match=r"log\.jsonl.*cannot be opened for appending.*directory"):
        JsonlWriter(tmp_path / "log.jsonl")
    (tmp_path / "file").touch()
    with pytest.raises(RollbookError, match=r"cannot be locked"):
        JsonlWriter(tmp_path / "file" / "log.jsonl")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "log.jsonl"]


def test_a_symlink_that_a_user_named_is_followed(tmp_path: Path) -> None:
    link = tmp_path / "log.jsonl"
    link.symlink_to(tmp_path / "elsewhere.jsonl")
    with JsonlWriter(link, follow_links=True) as writer:
        writer.append(b"{}")
    assert link.is_symlink()
    assert (tmp_path / "elsewhere.jsonl").read_bytes() == b"{}\n"


@pytest.mark.parametrize("tail", [b'{"half', b'{"whole":1}', b"\0\0\0", b"\xff\xfe", b"x" * 3_000_000])
def test_an_unterminated_tail_is_cut_on_reopen(path: Path, tail: bytes) -> None:
    path.write_bytes(b'{"a":1}\n{"b":2}\n' + tail)
    with JsonlWriter(path) as writer:
        assert path.read_bytes() == b'{"a":1}\n{"b":2}\n'
        assert writer.position == 16
        writer.append(b"{}")
    assert lines_of(path) == [b'{"a":1}', b'{"b":2}', b"{}"]


def test_a_file_that_is_only_a_half_line_becomes_empty(path: Path) -> None:
    path.write_bytes(b'{"a"' + b"x" * 3_000_000)
    with JsonlWriter(path) as writer:
        assert writer.position == 0
    assert path.read_bytes() == b""


@pytest.mark.usefixtures("tiny_chunks")
def test_the_last_newline_is_found_over_chunks(path: Path) -> None:
    for tail in range(30):
        path.write_bytes(b'{"a":1}\n' + b"t" * tail)
        JsonlWriter(path).close()
        assert path.read_bytes() == b'{"a":1}\n'


BAD_LINES = [
    (b"", "a blank line"),
    (b"  \t", "a blank line"),
    (b'{"a":1}{"b":2}', "two records glued together"),
    (b'{"a":1}\r{"b":2}', "not valid JSON"),
    (b"\0" * 40, "a run of NUL bytes"),
    (b'{"a":"\0"}', "not valid JSON"),
    (b"[1,2]", "not a JSON object"),
    (b"3", "not a JSON object"),
    (b"null", "not a JSON object"),
    (b'{"a":1', "not valid JSON"),
    (b"garbage", "not valid JSON"),
    (b'{"a":NaN}', "not valid JSON"),
    (b'{"a":"\xff"}', "not valid JSON"),
    (b'{"a":"\xed\xa0\x80"}', "not valid JSON"),
    (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not valid JSON"),
]


@pytest.mark.parametrize(
    ("bad", "why"), BAD_LINES, ids=[f"{why}-{n}" for n, (_, why) in enumerate(BAD_LINES)]
)
def test_any_other_bad_line_raises_with_file_and_number(path: Path, bad: bytes, why: str) -> None:
    content = b'{"a":1}\n{"b":2}\n' + bad + b'\n{"c":3}\n{"half'
    path.write_bytes(content)
    with pytest.raises(BadLineError) as caught:
        JsonlWriter(path)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert (caught.value.path, caught.value.line) == (path, 3)
    assert why in caught.value.why
    assert path.read_bytes() == content, "a file that is refused is left as it was"
    assert [entry.name for entry in path.parent.iterdir()] == ["log.jsonl"], "and not left locked"


def test_check_false_cuts_the_tail_and_reads_nothing_else(path: Path) -> None:
    path.write_bytes(b'garbage\n\n{"a":1}{"b":2}\n{"half')
    with JsonlWriter(path, check=False) as writer:
        writer.append(b"{}")
    assert path.read_bytes() == b'garbage\n\n{"a":1}{"b":2}\n{}\n'


def test_read_lines_between_offsets(path: Path) -> None:
    path.write_bytes(b'{"a":1}\n{"b":2}\n{"c":3}\n')
    assert [line.data for line in read_lines(path, start=8)] == [b'{"b":2}', b'{"c":3}']
    assert list(read_lines(path, start=8, end=16, number=2)) == [Line(b'{"b":2}', 2, 8, 16)]
    assert list(read_lines(path, end=15)) == [Line(b'{"a":1}', 1, 0, 8)], "an end inside a line leaves it out"
    assert list(read_lines(path, start=24)) == []
    assert list(read_lines(path, start=99)) == []
    assert list(read_lines(path, start=8, end=8)) == []


def test_read_lines_leaves_an_unterminated_tail_unless_told(path: Path) -> None:
    path.write_bytes(b'{"a":1}\n{"b":2}')
    assert lines_of(path) == [b'{"a":1}']
    assert list(read_lines(path, accept_tail=True))[1:] == [Line(b'{"b":2}', 2, 8, 15)]
    path.write_bytes(b'{"a":1}\n')
    assert [line.data for line in read_lines(path, accept_tail=True)] == [b'{"a":1}']


def test_read_lines_streams(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "_CHUNK", 1 << 12)
    path.write_bytes(b"{}\n" * 10_000)
    stream = read_lines(path)
    next(stream)
    path.write_bytes(b"")  # what was not read yet is gone: so it was not read ahead
    assert sum(1 for _ in stream) < 1 << 12


def test_a_line_over_many_chunks(path: Path) -> None:
    long = encode({"text": "é" * 2_500_000})
    with JsonlWriter(path) as writer:
        for data in (b"{}", long, b"{}", long):
            writer.append(data)
    assert lines_of(path) == [b"{}", long, b"{}", long]
    with JsonlWriter(path) as writer:
        assert writer.position == path.stat().st_size


@settings(deadline=None)
@given(content=CONTENT)
def test_any_content_splits_at_newlines_only(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl, "_CHUNK", 7)
        found = list(read_lines(path, accept_tail=True))
    *complete, tail = content.split(b"\n")
    assert [line.data for line in found] == complete + ([tail] if tail else [])
    assert [line.number for line in found] == list(range(1, len(found) + 1))
    assert [line.start for line in found] == [0, *(line.end for line in found)][: len(found)]
    for line in found:
        assert content[line.start : line.end].rstrip(b"\n") == line.data


@settings(deadline=None)
@given(content=CONTENT, size=st.integers(1, 12), data=st.data())
def test_blocks_are_the_file_cut_after_newlines(
    content: bytes, size: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "blocks.jsonl"
    path.write_bytes(content)
    begins = [0, *(place + 1 for place, byte in enumerate(content) if byte == ord("\n"))]
    start = data.draw(st.sampled_from(begins))
    blocks = list(read_blocks(path, start=start, size=size))
    assert b"".join(block for _, block in blocks) == content[start:]
    assert all(block.endswith(b"\n") for _, block in blocks[:-1])
    for offset, block in blocks:
        assert content[offset : offset + len(block)] == block


@settings(deadline=None, max_examples=40)
@given(texts=st.lists(st.text(st.characters(codec="utf-8")), max_size=8), cut=st.integers(0, 400))
def test_any_text_survives_and_any_cut_leaves_a_prefix(
    texts: list[str], cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "text.jsonl"
    path.unlink(missing_ok=True)
    with JsonlWriter(path) as writer:
        ends = [writer.append(encode({"text": text})) for text in texts]
    assert [json.loads(line)["text"] for line in lines_of(path)] == texts
    with path.open("r+b") as file:
        file.truncate(min(cut, path.stat().st_size))
    with JsonlWriter(path) as writer:
        assert writer.position == max([end for end in ends if end <= cut], default=0)
    assert [json.loads(line)["text"] for line in lines_of(path)] == texts[: sum(end <= cut for end in ends)]


@pytest.mark.parametrize("interval", [0, -1])
def test_a_policy_has_a_positive_interval(interval: int) -> None:
    with pytest.raises(ValueError, match="interval_ms must be positive"):
        every_ms(interval)


def test_lines_can_be_taken_back_and_others_come_in_their_place(path: Path) -> None:
    with JsonlWriter(path) as writer:
        first = writer.append(b'{"n":1}')
        writer.wait(writer.append(b'{"n":2}'))
        with pytest.raises(ValueError, match="past the last line"):
            writer.cut(writer.position + 1)
        writer.cut(first)
        assert (writer.position, writer.durable) == (first, first)
        writer.append(b'{"n":3}')
    assert [line.data for line in read_lines(path)] == [b'{"n":1}', b'{"n":3}']
    with pytest.raises(WriteError, match="closed"):
        writer.cut(0)


def test_closing_twice_is_fine_and_a_closed_writer_refuses(path: Path) -> None:
    writer = JsonlWriter(path)
    end = writer.append(b"{}")
    writer.close()
    writer.close()
    writer.wait(end)
    with pytest.raises(WriteError, match="the writer is closed"):
        writer.append(b"{}")
    assert path.read_bytes() == b"{}\n"
