"""The log has no carriage returns and loses no line; how its bytes were cut into reads does not matter."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.runs.jobs.console import CarriageReturns


def collapse(*pieces: bytes) -> bytes:
    returns = CarriageReturns(clock=lambda: 0.0)
    return b"".join(map(returns.feed, pieces)) + returns.finish()


@pytest.mark.parametrize(
    ("raw", "logged"),
    [
        (b"a\nb\n", b"a\nb\n"),
        (b"no newline", b"no newline\n"),
        (b"windows\r\nlines\r\n", b"windows\nlines\n"),
        (b"\r 1%\r 50%\r100%\ndone\n", b"100%\ndone\n"),
        (b"Loading\rLoading done\n", b"Loading\nLoading done\n"),
        (b"\r 50%\r\n", b" 50%\n"),
        (b"\r 50%\r      \rcleared\n", b"cleared\n"),
        (b"\r 1%\r 2%", b" 2%\n"),
        (b"\xff\xfe\x00binary\r\xc3\n", b"\xff\xfe\x00binary\n\xc3\n"),
        (b"\n\n\r\n", b"\n\n\n"),
        (b"", b""),
    ],
)
def test_what_the_log_shows(raw: bytes, logged: bytes) -> None:
    assert collapse(raw) == logged
    assert collapse(*(raw[index : index + 1] for index in range(len(raw)))) == logged


pieces = st.lists(
    st.sampled_from([b"\r", b"\n", b"\r\n", b"a", b"bc", b" ", b"\xff"]) | st.binary(), max_size=30
)


@given(pieces)
def test_chunks_make_no_difference_and_no_carriage_return_is_left(parts: list[bytes]) -> None:
    whole = collapse(b"".join(parts))
    assert collapse(*parts) == whole
    assert b"\r" not in whole


@given(st.binary().map(lambda data: data.replace(b"\r", b"")))
def test_text_without_carriage_returns_is_passed_on_at_once_and_unchanged(data: bytes) -> None:
    assert CarriageReturns().feed(data) == data


def test_a_long_progress_shows_itself_now_and_then() -> None:
    now = 0.0
    returns = CarriageReturns(clock=lambda: now)
    shown = b""
    for percent in range(100):
        now += 1.0
        shown += returns.feed(b"\r%3d%%" % percent)
    assert shown.count(b"\n") == 3
    assert b"\r" not in shown
    assert returns.feed(b"\n") == b" 99%\n"


def test_an_endless_line_is_not_kept_in_memory() -> None:
    returns = CarriageReturns()
    out = b"".join(returns.feed(b"\r" + b"x" * 70000) for _ in range(3)) + returns.finish()
    assert out.count(b"x") == 210000
