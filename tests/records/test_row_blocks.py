"""Lines are found whatever their lengths and however they lie across blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.records.row_blocks import line_blocks

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
