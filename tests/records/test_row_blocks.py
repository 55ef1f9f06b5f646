"""Lines are found whatever their lengths and however they lie across blocks."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.records import row_blocks
from rollbook.records.row_blocks import line_blocks, line_parts

PIECES = st.lists(st.sampled_from([b"\n", b"a", b"bc", b"\n\n", b"d" * 40]), max_size=30)


@settings(deadline=None)
@given(pieces=PIECES, size=st.integers(1, 64))
def test_the_same_lines_as_splitting(
    pieces: list[bytes], size: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = b"".join(pieces)
    path = tmp_path_factory.mktemp("lines") / "text"
    path.write_bytes(text)
    found: list[bytes] = []
    for offset, data, starts, ends in line_blocks(Path(path), size=size):
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            found.append(data[start:end].tobytes())
            assert text[offset + start : offset + end] == found[-1]
    lines = text.split(b"\n")
    assert found == (lines if lines[-1] else lines[:-1])


@settings(deadline=None)
@given(pieces=PIECES, part_bytes=st.integers(1, 64), skipped=st.integers(0, 3))
def test_parts_are_whole_lines_and_all_of_them(
    pieces: list[bytes], part_bytes: int, skipped: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = b"".join(pieces)
    path = tmp_path_factory.mktemp("parts") / "text"
    path.write_bytes(text)
    start = sum(len(line) for line in text.splitlines(keepends=True)[:skipped])
    parts = line_parts(path, part_bytes, start=start)
    assert parts[0][0] == start
    assert parts[-1][1] == len(text)
    for (_, end), (begin, _) in pairwise(parts):
        assert end == begin
        assert begin in (start, len(text)) or text[begin - 1 : begin] == b"\n"
    blocks = [block for place in parts for block in line_blocks(path, start=place[0], end=place[1], size=16)]
    ends = [block.offset + end for block in blocks for end in block.ends.tolist()]
    whole = [block.offset + end for block in line_blocks(path, start=start) for end in block.ends.tolist()]
    assert ends == whole


def test_a_long_line_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"a\n" + b"x" * 10_000 + b"\nb\n")
    looked: list[int] = []
    line_start = row_blocks._line_start

    def counted(path: Path, offset: int) -> int:
        looked.append(offset)
        return line_start(path, offset)

    monkeypatch.setattr(row_blocks, "_line_start", counted)
    parts = line_parts(path, 100)
    assert len(looked) == 1
    assert sorted({start for start, _ in parts}) == [0, 10_003]
