"""What the check of blocks lets pass, the reader that goes row by row lets pass too."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.data import quick_check
from rollbook.data.quick_check import Keys, hashes_of_keys
from rollbook.records.row_blocks import line_blocks
from rollbook.records.rows import read_rows

ROWS = [
    b'{"_rb_key":"a#0","x":[1,2.5e3,{"y":null}],"t":"\xc3\xa9\\n"}\n',
    b'{"_rb_key":"b#0","x":{"y":[{}]},"t":true}\n',
    b'{"_rb_key":"c#0","t":"\\ud83d\\ude00"}\n',
]
DAMAGE = [
    b"",
    b"}",
    b"{",
    b"\n",
    b"\r",
    b" ",
    b",",
    b'"',
    b"\xff",
    b"\xc3",
    b"\0",
    b"0",
    b"]",
    b"\\",
    b"}{",
    b"}\n{",
]


def is_quick(path: Path, directory: Path, size: int = 1 << 20) -> bool:
    keys = Keys(directory)
    for block in line_blocks(path, size=size):
        if (hashes := hashes_of_keys(block)) is None:
            return False
        keys.add(hashes)
    return keys.are_different()


@settings(max_examples=400, deadline=None)
@given(
    edits=st.lists(st.tuples(st.integers(0, 160), st.integers(0, 3), st.sampled_from(DAMAGE)), max_size=3),
    size=st.sampled_from([64, 1 << 20]),
)
def test_damage_is_never_let_pass(
    edits: list[tuple[int, int, bytes]], size: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = b"".join(ROWS)
    for place, removed, put in edits:
        text = text[:place] + put + text[place + removed :]
    directory = tmp_path_factory.mktemp("damage")
    path = directory / "a.jsonl"
    path.write_bytes(text)
    if is_quick(path, directory, size):
        rows = [row.value() for row in read_rows(path)]  # raises for a line that is no row
        lines = text.count(b"\n") + (not text.endswith(b"\n"))
        assert len({row["_rb_key"] for row in rows}) == len(rows) == lines


@pytest.mark.parametrize(
    "text",
    [
        ROWS[0].strip() + ROWS[1],  # glued
        b'{"_rb_key":"a","x":1}{"_rb_key":"b","x":\n2}\n',  # as many objects as lines, and neither on its own
        ROWS[0] + b"\n" + ROWS[1],
        ROWS[0] + ROWS[0],
        b'{"_rb_key":"a","x":"\xff"}\n',
        b'{"_rb_key":"a","x":1,}\n',
        b'{"_rb_key":null}\n',
        b'{"x":1}\n',
    ],
)
def test_doubts(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(text)
    assert not is_quick(tmp_path / "a.jsonl", tmp_path)


@pytest.mark.parametrize("repeated", [False, True])
def test_more_keys_than_are_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repeated: bool) -> None:
    monkeypatch.setattr(quick_check, "_HELD", 10)
    keys = [f"t{number}#0" for number in range(95)] + (["t3#0"] if repeated else [])
    (tmp_path / "a.jsonl").write_bytes(b"".join(orjson.dumps({"_rb_key": key}) + b"\n" for key in keys))
    assert is_quick(tmp_path / "a.jsonl", tmp_path, 64) is not repeated
