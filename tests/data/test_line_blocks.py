"""Lines are found whatever their lengths and however they lie across blocks."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.data.line_blocks import LineBlock, line_blocks

PIECES = st.lists(st.sampled_from([b"\n", b"a", b"bc", b"\n\n", b"d" * 40]), max_size=30)


@settings(deadline=None)
@given(pieces=PIECES, size=st.integers(1, 64), buffers=st.integers(1, 3))
def test_the_same_lines_as_splitting(
    pieces: list[bytes], size: int, buffers: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = b"".join(pieces)
    path = tmp_path_factory.mktemp("lines") / "text"
    path.write_bytes(text)
    found: list[bytes] = []
    ring = deque(bytearray(size) for _ in range(buffers))
    before: list[tuple[LineBlock, bytes]] = []
    for block in line_blocks(Path(path), ring=ring):
        offset, data, starts, ends = block
        before = [*before, (block, data.tobytes())][-buffers:]
        assert all(earlier.data.tobytes() == copy for earlier, copy in before)
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            found.append(data[start:end].tobytes())
            assert text[offset + start : offset + end] == found[-1]
    lines = text.split(b"\n")
    assert found == (lines if lines[-1] else lines[:-1])
    assert len(ring) == buffers
